"""Modules in the place of one of a model's, which they hold.

What the blocks below the adapters compute of an example never changes, so it can be injected. A
model of mlx-lm calls its blocks one after another. With states injected, the last frozen block
returns them and those before it return their input; embedding and blocks are never computed.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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


class Injection:
    def __init__(self) -> None:
        self.states: mx.array | None = None  # [B, T, D], in place of all that they compute
        self.stops = False  # whether the forward ends at the last of them


class _Stopped(Exception):
    """A forward reached the end of the frozen blocks; ``states`` is what they computed."""

    def __init__(self, states: object) -> None:
        self.states = states


class FrozenBlock(WrappedBlock):
    """A block below the adapters, which is not computed while its states are injected."""

    def __init__(self, block: nn.Module, injection: Injection, is_last: bool) -> None:
        super().__init__(block)
        self.injection = injection
        self.is_last = is_last

    def __call__(self, *args: mx.array, **kwargs: object) -> object:
        if self.injection.states is not None:
            return self.injection.states if self.is_last else args[0]

        states = self["block"](*args, **kwargs)
        if self.injection.stops and self.is_last:
            raise _Stopped(states)
        return states


@contextmanager
def injected(model: nn.Module, states: mx.array) -> Iterator[None]:
    """Let the frozen or remote blocks of a model return ``states`` [B, T, D]."""
    injection = _injection(model)
    injection.states = states
    try:
        yield
    finally:
        injection.states = None


def frozen_output(model: nn.Module, forward: Callable[[], object]) -> object:
    """Return the output of the frozen blocks in a forward pass, which ends there.

    A forward that never gets there is a ValueError.
    """
    injection = _injection(model)
    injection.stops = True
    try:
        forward()
    except _Stopped as end:
        return end.states
    finally:
        injection.stops = False
    raise ValueError("its blocks are not called")


def _injection(model: nn.Module) -> Injection:
    injections = (vars(module).get("injection") for module in model.modules())
    return next(each for each in injections if isinstance(each, Injection))
