"""Tasks whose examples are several texts each, with a loss by name and one phase."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from ..config.data import COLUMN_SETTINGS
from ..config.schema import TrainConfig
from ..data.dataset import Batch
from ..data.shapes import padded_length
from ..data.texts import TextGroups
from ..errors import PackError, flag_of
from ..evaluation.scores import Metrics, MetricScore
from ..objectives.objective import TextsObjective
from ..packs.base import Base
from .phases import PhaseData
from .task import Summary, Task, Trained, summarized


class TextsTask(Task):
    """A task on pairs or rankings, whose columns have names of their own."""

    examples_are: ClassVar[str]  # as messages name them
    most_held_out: ClassVar[int]  # examples that a run is evaluated on by default

    base: Base
    loss: str  # its name
    limit: int  # most tokens of a text

    def check(self, name: str, model_type: str) -> None:
        super().check(name, model_type)
        if misplaced := self.columns.changed(COLUMN_SETTINGS):
            flags = ", ".join(map(flag_of, misplaced))
            raise PackError(
                f"{flags}: not with --task {self.train.task}, whose examples are "
                f"{self.examples_are}. Leave it out.",
                "conflict",
            )

    def sampled(self, data: PhaseData) -> np.ndarray:
        count = data.held_out_examples.count
        return np.random.RandomState(0).permutation(count)[: self.most_held_out]

    def typical_inputs(self, data: PhaseData) -> int:
        """Return the padded length of a text of median length."""
        lengths = np.sort(data.train.examples.lengths)
        return padded_length(int(lengths[len(lengths) // 2]), self.limit)

    def score(
        self,
        objective: TextsObjective,
        batches: Sequence[Batch],
        examples: TextGroups | None = None,
    ) -> MetricScore:
        """Return the metrics of held-out examples, and the loss of batches."""
        objective.model.eval()
        loss = objective.mean_loss(batches)
        if examples is None:
            return MetricScore(loss, {})
        return MetricScore(loss, self.metrics(objective, examples), len(examples))

    def metrics(self, objective: Any, examples: TextGroups) -> Metrics:
        raise NotImplementedError

    def summary_of(self, trained: Trained, objective: Mapping) -> Summary:
        """Return the summary of a run; ``objective`` is what a manifest has besides the loss."""
        named = {"task": self.train.task, "loss": self.loss, **objective}
        held_out = {"format": trained.last.held_out.examples.format.name}
        return summarized(trained, named, report={"loss": self.loss}, held_out=held_out)

    def planned_settings(self, train: TrainConfig) -> TrainConfig:
        return replace(train, loss=self.loss)
