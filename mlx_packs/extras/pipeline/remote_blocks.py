"""Blocks that another rank of a pipeline computes.

A forward pass enters behind those before the own blocks, and ends at the first one after them.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...nn.frozen_blocks import Injection


class StageEnd(Exception):
    """A forward pass has left the blocks of a rank; ``states`` is what they computed."""

    def __init__(self, states: mx.array) -> None:
        self.states = states


class RemoteBlock(nn.Module):
    """Stands in for a block of another rank, without weights but with its plain attributes.

    ``injection`` has the states [B, T, D] that enter the own blocks; those behind them have none.
    """

    def __init__(self, block: nn.Module, injection: Injection | None) -> None:
        super().__init__()
        for name, value in vars(block).items():
            if isinstance(value, (bool, int, float, str)) and not name.startswith("_"):
                setattr(self, name, value)
        self.injection = injection

    def __call__(self, states: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        """Return the states that enter the own blocks; raise StageEnd with those that left them."""
        if self.injection is None:
            raise StageEnd(states)
        if self.injection.states is None:
            return states
        return self.injection.states


class RemoteEmbedding(nn.Module):
    """Stands in for an embedding of another rank: zeros [..., D], which nothing reads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def __call__(self, tokens: mx.array) -> mx.array:
        return mx.zeros((*tokens.shape, self.width))


class RemoteHead(nn.Module):
    """Stands in for a head of another rank, which no forward pass reaches."""


def stage_output(forward: Callable[[], mx.array]) -> mx.array:
    """Return the states [B, T, D] that leave the blocks of a rank; a ValueError if none do."""
    try:
        forward()
    except StageEnd as end:
        return end.states
    raise ValueError("no block of another rank follows")
