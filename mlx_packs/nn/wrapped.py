"""Modules in the place of one of a model's, which they hold."""

import copy
import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
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


class NoisyEmbedding(nn.Module):
    """A frozen or trained embedding [V, D] with uniform noise on its rows in training.

    Semantics: rows + uniform(-1, 1) * alpha / sqrt(T * D)

    T is the length of the sequences of a batch, padding included, as in transformers and TRL. The
    authors try 5 to 15 for ``alpha``.

    NEFTune: https://arxiv.org/abs/2310.05914
    """

    def __init__(self, embedding: nn.Module, alpha: float) -> None:
        super().__init__()
        self.embedding = embedding
        self._alpha = alpha

    def __call__(self, tokens: mx.array) -> mx.array:
        rows = self.embedding(tokens)
        if not self.training:
            return rows

        size = self._alpha / math.sqrt(math.prod(rows.shape[-2:]))
        return rows + mx.random.uniform(-size, size, rows.shape, rows.dtype)

    def as_linear(self, x: mx.array) -> mx.array:
        return self.embedding.as_linear(x)
