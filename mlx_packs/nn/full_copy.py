"""A module that is trained in full beside adapters, while all others are frozen."""

import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn


class FullCopy(nn.Module):
    """A module with float32 weights that computes in the dtypes of the one that it replaces.

    Where activations are in half precision, nothing after it is promoted, and what is computed is
    what a pack computes, which has the weights in the base's dtypes.
    """

    def __init__(self, module: nn.Module, dtypes: dict[str, mx.Dtype]) -> None:
        super().__init__()
        self.module = module
        self._dtypes = dtypes

    def _cast(self) -> nn.Module:
        cast = copy.copy(self.module)
        for name, dtype in self._dtypes.items():
            cast[name] = self.module[name].astype(dtype)
        return cast

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._cast()(*args, **kwargs)

    def as_linear(self, x: mx.array) -> mx.array:
        return self._cast().as_linear(x)


def trained_module(module: nn.Module) -> nn.Module:
    """Return what is trained inside a `FullCopy`, else the module itself."""
    if isinstance(module, FullCopy):
        return module.module
    return module
