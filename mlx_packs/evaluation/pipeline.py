"""Held-out perplexity by the ranks of a pipeline."""

import mlx.nn as nn

from ..adapters.trainable import trainable_modules
from ..data.dataset import Batch
from ..objectives.objective import arrays_of
from ..objectives.pipeline import Stage
from ..runtime import mx
from .perplexity import Scorer


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
