"""The next token by a pipeline: every rank computes its blocks, the last one the loss.

The ranks call the same methods in the same order.
"""

from collections.abc import Callable
from typing import Any

import mlx.nn as nn

from ...adapters.trainable import trainable_modules
from ...data.dataset import Batch
from ...errors import PackError
from ...evaluation.perplexity import Scorer
from ...late import load
from ...objectives.causal_lm import CausalLM, LossOptions, forward, split_head
from ...objectives.objective import arrays_of
from ...objectives.score import Score
from ...runtime import mx
from .remote_blocks import stage_output
from .stages import Stages

_PROBE = (1, 4)
_DTYPES = (mx.float32, mx.float16, mx.bfloat16)


class Stage:
    """The blocks of this rank, and the states that it exchanges with its neighbours.

    Args:
        model: the base, in which other ranks' modules are remote (adapters.py).
        stages: the ranks.

    Attributes:
        head: on the last rank, hidden states and head; None where they cannot be split.
    """

    def __init__(self, model: nn.Module, stages: Stages) -> None:
        self.model, self.stages = model, stages
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

        Args:
            entering: tokens [B, T] on the first rank, else states [B, T, D].
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
        """Return what enters the own blocks: tokens [B, T], or states that the rank before sends."""
        if self.stages.is_first:
            return tokens
        shape = (*tokens.shape, self._width)
        return self.stages.receive(shape, self.dtype, self.stages.rank - 1)

    def pass_on(self, states: mx.array) -> None:
        """Send states to the next rank."""
        self.stages.send(states.astype(self.dtype), self.stages.rank + 1)

    def gradient(self, entering: mx.array) -> mx.array:
        """Return the gradient of the states that left the own blocks, which the next rank sends."""
        shape = (*entering.shape[:2], self._width)
        return self.stages.receive(shape, self.dtype, self.stages.rank + 1)

    def pass_back(self, gradient: mx.array) -> None:
        """Send the gradient of the states that entered to the rank before."""
        self.stages.send(gradient.astype(self.dtype), self.stages.rank - 1)


class PipelinedCausalLM(CausalLM):
    """The next token of each input, by the ranks of a pipeline.

    On the last rank `loss` reads the states that enter in the place of tokens.

    Args:
        stage: this rank's.
        score: as of `CausalLM`, as is ``options``.
    """

    def __init__(self, stage: Stage, score: Callable[..., Score], options: LossOptions) -> None:
        super().__init__(stage.model, stage.head, None, score, options)
        self.stage = stage

    def make_stepper(self, *arguments: Any) -> Any:
        """Return what exchanges states and gradients with the neighbours."""
        return load("extras.pipeline.step:PipelineStepper")(self, *arguments)


class PipelinedScorer(Scorer):
    """Scores batches by all ranks; each of them has the scores.

    Args:
        model: the base, of which other ranks' modules are remote.
        stage: this rank's.
    """

    def __init__(self, model: nn.Module, stage: Stage) -> None:
        super().__init__(model, stage.head)
        self._stage = stage
        states = [module.state for module in trainable_modules(model)]
        self._output = mx.compile(stage.output, inputs=states)

    def _values(self, batch: Batch) -> list[mx.array]:
        """Return NLL [M] and whether the target ranks first [M], both in float32."""
        stage = self._stage
        inputs = arrays_of(batch)
        entering = stage.entering(inputs["tokens"])
        if stage.stages.is_last:
            values = self._forward({**inputs, "states": entering}, batch.layout)
        else:
            stage.pass_on(self._output(entering))
            values = [mx.zeros(inputs["targets"].shape)] * 2
        return [stage.stages.from_last(value.astype(mx.float32)) for value in values]
