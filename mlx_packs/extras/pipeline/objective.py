"""The next token by a pipeline, whose ranks call the same methods in the same order."""

from collections.abc import Callable
from typing import Any

import mlx.nn as nn
from mlx.optimizers import Optimizer

from ...adapters.trainable import trainable_modules
from ...data.dataset import Batch
from ...evaluation.perplexity import Scorer
from ...objectives.causal_lm import CausalLM, LossOptions
from ...objectives.objective import arrays_of
from ...objectives.score import Score
from ...runtime import mx
from .stage import Stage
from .step import PipelineStepper


class PipelinedCausalLM(CausalLM):
    """The next token of each input, by the ranks of a pipeline.

    On the last rank `loss` reads the states that enter in the place of tokens.
    """

    def __init__(self, stage: Stage, score: Callable[..., Score], options: LossOptions) -> None:
        super().__init__(stage.model, stage.head, None, score, options)
        self.stage = stage

    def make_stepper(self, optimizer: Optimizer, *others: Any) -> PipelineStepper:
        return PipelineStepper(self.stage, self.loss, optimizer, *others)


class PipelinedScorer(Scorer):
    """Scores batches by all ranks; each of them has the scores."""

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
