"""A module that takes the place of a block."""

from typing import Any

import mlx.nn as nn


class WrappedBlock(nn.Module):
    """Holds ``block``, and has its attributes: some models read those of their blocks."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "block":
                raise
            return getattr(self["block"], name)
