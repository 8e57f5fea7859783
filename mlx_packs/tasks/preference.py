"""Preferences of completions: which of two is better, or whether one is good."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ..bases.model import check_forward
from ..config.choices import TASKS
from ..config.data import DataConfig
from ..data.dataset import Dataset, Layout
from ..data.encoding import EncodingOptions, Examples
from ..data.formats import COMPLETION, PREFERENCE, Row
from ..data.preferences import (
    both_completions,
    encode_preferences,
    preference_evaluation,
    preference_set,
)
from ..data.rows import Splits
from ..data.sampler import Draw, GroupedSampler, grouped
from ..data.shapes import sequence_inputs
from ..data.sharing import plan_trees
from ..data.task_formats import RATED
from ..evaluation.preferences import VALIDATED, score_preferences
from ..objectives.causal_lm import split_head
from ..objectives.objective import Inputs, Objective
from ..objectives.preference import PreferenceObjective, completion_sums, loss_of
from ..objectives.reference import Reference
from ..packs.base import Base
from ..runtime import mx
from .phases import PhaseData, RunPhase, encode_each
from .sample_prompt import SamplePrompt, followed_rows, stored_sample
from .task import Binding, Summary, Trained, summarized
from .tokens import TokenTask


class PreferenceTask(TokenTask):
    """``--task dpo``, ``orpo``, ``simpo``, ``cpo`` and ``kto``."""

    validated = VALIDATED
    cut_parts = "completions"

    sample: SamplePrompt

    def encode(
        self, base: Base, phases: Sequence[RunPhase], splits: Sequence[Splits]
    ) -> list[PhaseData]:
        """Encode the examples, and take the prompt of the first held-out row."""
        data = super().encode(base, phases, splits)
        columns = phases[-1].columns
        self.sample = self._prompt_of(splits[-1].first_usable(data[-1].held_out_split), columns)
        rows = followed_rows(self.train, splits[-1])
        self.followed = [self._prompt_of(row, columns) for row in rows]
        return data

    def _prompt_of(self, row: Row, columns: DataConfig) -> SamplePrompt:
        if not TASKS[self.train.task].rated:
            row = both_completions([row], columns)[0]
        content = COMPLETION.read(row, columns, self.base.tokenizer)
        return SamplePrompt.of(content, self.base)

    def described(self, examples: Mapping[str, Examples]) -> str:
        return f"examples · {examples['train'].format}"

    def encoded(self, phase: RunPhase, read: Splits) -> dict[str, Examples]:
        columns = phase.columns
        length = phase.train.max_seq_length
        options = EncodingOptions(max_seq_length=length, vocab_size=self.base.vocab_size)
        row_format = RATED if TASKS[self.train.task].rated else PREFERENCE

        def encode(split: str, advance: Callable[[], None]) -> Examples:
            return encode_preferences(
                read.rows[split],
                self.base.tokenizer,
                columns,
                options,
                row_format,
                self.train.num_proc,
                advance,
            )

        completions = 1 if row_format is RATED else 2
        steps = {split: completions * len(read.rows[split]) for split in read.present()}
        return encode_each(read, encode, self.display, steps, "completions")

    def training(self, phase: RunPhase, examples: Examples, draw: Draw) -> Dataset:
        t = phase.train
        inputs = sequence_inputs(t.max_seq_length)
        sampler = GroupedSampler(examples.lengths, 2 * t.batch_size, inputs, t.seed, draw=draw)
        trees = self._plan_trees(phase, examples, sampler, together=2)
        return preference_set(examples, sampler, trees)

    def evaluation(self, phase: RunPhase, examples: Examples, chosen: np.ndarray) -> Dataset:
        """Return rows by length."""
        t = phase.train
        inputs = sequence_inputs(t.max_seq_length)
        trees = None
        if self.trees:  # for which the model is checked
            trees = plan_trees(t, self.lora, examples, grouped(chosen), together=2)

        return preference_evaluation(examples, t.batch_size, inputs, chosen, trees)

    def _costs(self, examples: Examples) -> np.ndarray:
        return examples.row_lengths.sum(axis=1)

    def bind(self, binding: Binding) -> list[Objective]:
        """Return the loss of the rows, which has the reference of its phase."""
        model = binding.trainable.model
        head = split_head(model)
        check_forward(self.base, self.sample.tokens)
        self.prepare_rows(binding.trainable, head)

        def sums(inputs: Inputs, layout: Layout) -> mx.array:
            return completion_sums(model, head, inputs, layout)[0]

        objectives: list[Objective] = []
        for data in binding.data:
            train = data.phase.train
            reference = Reference(model, binding.references[data.phase.name], sums, data.train)
            objectives.append(PreferenceObjective(model, head, train, reference, score_preferences))
        return objectives

    def summary(self, trained: Trained) -> Summary:
        train = self.train
        sample = self.sample.report(trained.initial, self.base)
        samples = {}
        if sample["before"] or sample["after"]:
            samples = {"samples": [stored_sample(sample)]}

        named = {"task": train.task, "loss_on": "completion", "beta": train.beta}
        if TASKS[train.task].losses:
            named["loss"] = loss_of(train)

        report = {"sample": sample, "shared_prefix": self.shared_report(trained.last)}
        return summarized(trained, named, samples, report)
