"""A module that stands in the place of a block and answers for it."""

import mlx.nn as nn


class WrappedBlock(nn.Module):
    """Holds ``block``; what it has not itself (some models read attributes of blocks) is the
    block's."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block = block

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "block":
                raise
            return getattr(self["block"], name)
