"""The blocks of a rank, and what it exchanges with its neighbours."""

import mlx.nn as nn

from ...errors import PackError
from ...objectives.causal_lm import forward, split_head
from ...runtime import mx
from .remote_blocks import stage_output
from .stages import Stages

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
