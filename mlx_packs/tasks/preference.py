"""Preferences of completions: which of two is better, or whether one is good."""

from collections.abc import Callable, Sequence

import numpy as np

from ..config.choices import TASKS
from ..data.dataset import Dataset, Layout
from ..data.encoding import EncodingOptions, Examples
from ..data.formats import COMPLETION, PREFERENCE
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
from ..display import VERBOSE
from ..evaluation.preferences import VALIDATED, score_preferences
from ..objectives.causal_lm import split_head
from ..objectives.objective import Inputs, Objective
from ..objectives.preference import PreferenceObjective, completion_sums, loss_of
from ..objectives.reference import Reference
from ..packs.base import Base, check_forward
from ..runtime import mx
from .causal_lm import SamplePrompt, stored_sample
from .phases import PhaseData, RunPhase, counted, encode_each, phase_data, show_notes, show_phase
from .task import Binding, Summary, Trained, summarized
from .tokens import TokenTask


class PreferenceTask(TokenTask):
    """``--task dpo``, ``orpo``, ``simpo``, ``cpo`` and ``kto``."""

    validated = VALIDATED

    base: Base
    sample: SamplePrompt

    def encode(
        self, base: Base, phases: Sequence[RunPhase], splits: Sequence[Splits]
    ) -> list[PhaseData]:
        self.base = base
        encoded: list[dict[str, Examples]] = []
        for phase, read in zip(phases, splits, strict=True):
            show_phase(phase, self.display)
            encoded.append(self._encoded_splits(phase, read))
            self._describe(phase, read, encoded[-1])

        data = phase_data(self, phases, encoded)
        self._choose_examples(data[-1], splits[-1])
        return data

    def _encoded_splits(self, phase: RunPhase, read: Splits) -> dict[str, Examples]:
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

    def _describe(self, phase: RunPhase, read: Splits, examples: dict[str, Examples]) -> None:
        """Show the number of rows, and what was cut."""
        train = phase.train
        first = examples["train"]
        display = self.display
        counts = counted(examples)
        display.line("data", f"{read.source} · {counts} examples · {first.format}")
        display.line("", f"{first.targets:,} supervised tokens", VERBOSE)

        if cut := sum(e.cut for e in examples.values()):
            limit = train.max_seq_length
            line = f"longer than {limit} tokens (--max-seq-length): {cut} completions cut"
            if dropped := sum(e.dropped for e in examples.values()):
                line += f", {dropped} examples dropped, since no target was left"
            display.line("data", line)
        show_notes(read, phase.columns, self.base.tokenizer, display)

    def _choose_examples(self, data: PhaseData, splits: Splits) -> None:
        """Take the prompt of the first held-out row."""
        row = splits.first_usable(data.held_out_split)
        columns = data.phase.columns
        if not TASKS[self.train.task].rated:
            row = both_completions([row], columns)[0]
        content = COMPLETION.read(row, columns, self.base.tokenizer)
        self.sample = SamplePrompt.of(content, self.base)

    def bind(self, binding: Binding) -> list[Objective]:
        """Return the loss of the rows, which has the reference of its phase."""
        model = binding.trainable.model
        head = split_head(model)
        check_forward(self.base, self.sample.tokens)
        self.prepare_rows(binding.trainable, head)

        def sums(inputs: Inputs, layout: Layout) -> mx.array:
            return completion_sums(model, head, inputs, layout)[0]

        objectives: list[Objective] = []
        for own in binding.data:
            initial = binding.references[own.phase.name]
            reference = Reference(model, initial, sums, own.train)
            objective = PreferenceObjective(
                model, head, own.phase.train, reference, score_preferences
            )
            objectives.append(objective)
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
