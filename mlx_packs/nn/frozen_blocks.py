"""Blocks below the adapters: what they compute of an example never changes, so it can be injected.

A model of mlx-lm calls its blocks one after another. With states injected, the last frozen block
returns them and those before it return their input; embedding and blocks are never computed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn

from .wrapped import WrappedBlock


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
