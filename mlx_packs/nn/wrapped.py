"""A module that takes the place of a block, and modules that one uses without having them."""

from collections.abc import Sequence
from typing import Any

import mlx.nn as nn


class WrappedBlock(nn.Module):
    """Holds ``block``, and has its attributes and class: some models ask their blocks for them."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    @property
    def __class__(self) -> type:  # to `isinstance` besides its own
        return self["block"].__class__

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "block":
                raise
            return getattr(self["block"], name)


class Hidden:
    """Modules that are not a part of the one that uses them."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.all = list(modules)
