"""Blocks below the adapters: what they make of a row never changes, so it can be given instead.

A model of mlx-lm calls its blocks one after another. With the states given, the last frozen block
answers with them and those before it pass their input on; embedding and blocks are never computed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn

from .wrapped import WrappedBlock


class Feed:
    """What the frozen blocks of one model do now.

    states: [B, T, D], given in the place of all that they compute.   stops: end the forward at the
    last of them.
    """

    def __init__(self):
        self.states: mx.array | None = None
        self.stops = False


class Reached(Exception):
    """A forward came to the end of the frozen blocks; ``states`` is what they made."""

    def __init__(self, states: object):
        self.states = states


class FrozenBlock(WrappedBlock):
    """A block below the adapters, which is not computed while its states are given."""

    def __init__(self, block: nn.Module, feed: Feed, is_last: bool):
        super().__init__(block)
        self.feed = feed
        self.is_last = is_last

    def __call__(self, *args, **kwargs):
        if self.feed.states is not None:
            return self.feed.states if self.is_last else args[0]
        made = self["block"](*args, **kwargs)
        if self.feed.stops and self.is_last:
            raise Reached(made)
        return made


@contextmanager
def fed(model: nn.Module, states: mx.array) -> Iterator[None]:
    """Let the frozen blocks of a model answer with ``states`` [B, T, D]."""
    feed = _feed_of(model)
    feed.states = states
    try:
        yield
    finally:
        feed.states = None


def states_of(model: nn.Module, forward: Callable[[], object]) -> object:
    """What the frozen blocks make in a forward, which ends there.

    Raises: ValueError if it never comes there.
    """
    feed = _feed_of(model)
    feed.stops = True
    try:
        forward()
    except Reached as end:
        return end.states
    finally:
        feed.stops = False
    raise ValueError("its blocks are not called")


def _feed_of(model: nn.Module) -> Feed:
    return next(m.feed for m in model.modules() if isinstance(m, FrozenBlock))
