"""Tasks whose examples are several texts each, with a loss by name and one phase."""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import numpy as np

from ..config.data import COLUMN_SETTINGS
from ..config.schema import TrainConfig
from ..data.shapes import padded_length
from ..errors import PackError, flag_of
from ..evaluation.scores import before_and_after
from ..packs.base import Base
from .phases import PhaseData
from .task import Summary, Task, Trained, summarized


class TextsTask(Task):
    """A task on pairs or rankings, whose columns have names of their own."""

    examples_are: ClassVar[str]  # as messages name them
    most_held_out: ClassVar[int]  # examples that a run is evaluated on by default

    base: Base
    loss: str  # its name

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

    def typical_inputs(self, data: PhaseData, limit: int) -> int:
        """Return the padded length of a text of median length, of ``limit`` tokens at most."""
        lengths = np.sort(data.train.examples.lengths)
        return padded_length(int(lengths[len(lengths) // 2]), limit)

    def _summary(self, trained: Trained, row_format: str, objective: Mapping) -> Summary:
        """Return the summary of a run; ``objective`` is what a manifest has besides the loss."""
        before, after = trained.ends()
        rows = len(trained.last.held_out.examples)
        metrics = {"rows": rows, **before_and_after(before.metrics, after.metrics)}
        named = {"task": self.train.task, "loss": self.loss, **objective}
        report = {"loss": self.loss}
        return summarized(trained, metrics, named, None, report, {"format": row_format})

    def planned_settings(self, train: TrainConfig) -> TrainConfig:
        return replace(train, loss=self.loss)
