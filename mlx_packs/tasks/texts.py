"""Tasks on texts, one or several in an example: what is read of them is compared with labels."""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import numpy as np

from ..config.data import COLUMN_SETTINGS
from ..config.schema import TrainConfig
from ..data.dataset import Dataset
from ..data.sampler import Draw, Sampler
from ..data.shapes import padded_length, sequence_inputs
from ..data.texts import TextCollate, TextGroups, joined_widths, texts_once
from ..errors import PackError, flag_of
from .phases import PhaseData, RunPhase, sample
from .task import Summary, Task, Trained, summarized


class TextsTask(Task):
    """A task on texts that are read as a whole: at their last tokens, or pooled."""

    def longest_text(self, train: TrainConfig) -> int:
        return min(train.max_seq_length, self.base.text_limit)

    def described(self, examples: Mapping[str, TextGroups]) -> str:
        return f"examples · {examples['train'].format.name}"

    def training(self, phase: RunPhase, examples: TextGroups, draw: Draw) -> Dataset:
        """Return the training batches of a phase, whose examples are drawn from all."""
        t = phase.train
        inputs = sequence_inputs(t.max_seq_length)
        sampler = Sampler(examples.lengths, t.batch_size, inputs, t.seed, draw=draw)
        widths = joined_widths(examples, sampler)
        return Dataset(examples, TextCollate(t.batch_size, inputs, widths, True), sampler)

    def evaluation(self, phase: RunPhase, examples: TextGroups, chosen: np.ndarray) -> Dataset:
        t = phase.train
        collate = TextCollate(t.batch_size, sequence_inputs(t.max_seq_length))
        return texts_once(examples, collate, chosen)

    def sampled(self, data: PhaseData) -> np.ndarray:
        """Return held-out examples in proportion to the tokens that the phase trains on."""
        t = data.phase.train
        tokens = data.train.examples.text_lengths.sum(axis=1)
        trained = t.iters * t.batch_size * float(tokens.mean())
        return sample(data.held_out_examples.text_lengths.sum(axis=1), trained)

    def typical_rows(self, data: PhaseData) -> tuple[int, int] | None:
        """Return the tokens of a typical batch, and those that reach the head."""
        examples = data.train.examples
        lengths = np.sort(examples.lengths)
        inputs = padded_length(int(lengths[len(lengths) // 2]), data.train.collate.limit)
        texts = max(1, round(data.phase.train.batch_size * float(examples.sizes.mean())))
        return texts * inputs, texts


class NamedLossTask(TextsTask):
    """A task with losses by name and one phase, whose columns have names of their own."""

    examples_are: ClassVar[str]  # as messages name them
    most_held_out: ClassVar[int]  # examples that a run is evaluated on by default

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

    def summary_of(self, trained: Trained, objective: Mapping) -> Summary:
        """Return the summary of a run; ``objective`` is what a manifest has besides the loss."""
        named = {"task": self.train.task, "loss": self.loss, **objective}
        held_out = {"format": trained.last.held_out.examples.format.name}
        return summarized(trained, named, report={"loss": self.loss}, held_out=held_out)

    def planned_settings(self, train: TrainConfig) -> TrainConfig:
        return replace(train, loss=self.loss)
