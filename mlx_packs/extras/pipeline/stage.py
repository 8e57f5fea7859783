"""The stages of a pipeline: the ranks, the blocks of each, and what stands for those of others."""

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.nn as nn
import numpy as np

from ...distributed.group import Group, T
from ...errors import PackError
from ...nn.wrapped import Injection
from ...objectives.causal_lm import forward, split_head
from ...runtime import mx


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


class Stages(Group):
    """Ranks that pass the states of a batch on, and their gradients back.

    A message goes to a neighbour and is over when the neighbour has it. GPipe's order is safe: the
    states of all pieces of a batch go forward before a gradient goes back.
    """

    def __init__(self, ranks: Group) -> None:
        super().__init__(ranks.native)

    @property
    def batch_shares(self) -> int:
        """One: every rank takes part in all of a batch."""
        return 1

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last blocks, and computes the loss."""
        return self.rank == self.size - 1

    def send(self, array: mx.array, rank: int) -> None:
        """Send an array to a neighbour, and wait until it is there."""
        mx.eval(mx.distributed.send(array, rank, group=self.native))

    def receive(self, shape: Sequence[int], dtype: mx.Dtype, rank: int) -> mx.array:
        array = mx.distributed.recv(shape, dtype, rank, group=self.native)
        mx.eval(array)
        return array

    def from_last(self, array: mx.array) -> mx.array:
        """Return the array of the last rank; other ranks pass one of the same shape."""
        return self.sum(array if self.is_last else mx.zeros_like(array))

    def norm(self, norm: mx.array) -> mx.array:
        """Return the L2 norm of what all ranks have, given the norm of this rank's part."""
        return mx.sqrt(self.sum(norm.square()))

    def union(self, arrays: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Return the arrays of all ranks by name; of equal names they must be equal."""
        content = io.BytesIO()
        mx.save_safetensors(content, dict(arrays))
        united: dict[str, mx.array] = {}
        for received in self.gathered(content.getvalue()):
            united |= mx.load(io.BytesIO(received), format="safetensors")
        return united

    def map(
        self, function: Callable[[T], Sequence[np.ndarray]], items: Sequence[T]
    ) -> list[list[np.ndarray]]:
        return [list(map(np.asarray, function(item))) for item in items]


_PROBE = (1, 4)
_DTYPES = (mx.float32, mx.float16, mx.bfloat16)


class Stage:
    """The blocks of this rank, and the states that it exchanges with its neighbours.

    In ``model`` other ranks' modules are remote (adapters.py). ``head`` is None except on the last
    rank, and where hidden states and head cannot be split.
    """

    def __init__(self, model: nn.Module, stages: Stages) -> None:
        self.model = model
        self.stages = stages

        states = mx.zeros((*_PROBE, 0))
        if stages.is_first:
            states = self.output(mx.zeros(_PROBE, mx.int32))
        self._width, dtype = stages.highest(states.shape[-1], _DTYPES.index(states.dtype))
        self.dtype = _DTYPES[dtype]

        self.head = None
        if stages.is_last:
            probe = mx.random.normal((*_PROBE, self._width), key=mx.random.key(0))
            self.head = split_head(model, probe.astype(self.dtype))

    def output(self, entering: mx.array) -> mx.array:
        """Return the states [B, T, D] that leave the own blocks, which are not the last.

        On the first rank tokens [B, T] enter, else states [B, T, D].
        """
        states = stage_output(lambda: forward(self.model, self.model, entering))
        if states.ndim != 3:
            raise PackError(
                f"--pipeline: a block passes on {list(states.shape)} in place of [B, T, D].",
                "unsupported",
                "pipeline",
            )
        return states

    def entering(self, tokens: mx.array) -> mx.array:
        """Return what enters the own blocks: tokens [B, T], or states from the rank before."""
        if self.stages.is_first:
            return tokens
        shape = (*tokens.shape, self._width)
        return self.stages.receive(shape, self.dtype, self.stages.rank - 1)

    def pass_on(self, states: mx.array) -> None:
        self.stages.send(states.astype(self.dtype), self.stages.rank + 1)

    def gradient(self, entering: mx.array) -> mx.array:
        """Return the gradient of the states that left the own blocks, which the next rank sends."""
        shape = (*entering.shape[:2], self._width)
        return self.stages.receive(shape, self.dtype, self.stages.rank + 1)

    def pass_back(self, gradient: mx.array) -> None:
        self.stages.send(gradient.astype(self.dtype), self.stages.rank - 1)
