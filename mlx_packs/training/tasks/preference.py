"""Preferences of completions: which of two is better, or whether one is good."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ...adapters.trainable import Trainable
from ...config.data import DataConfig
from ...config.schema import TrainConfig
from ...data.encoding import EncodingOptions
from ...data.formats import COMPLETION, PREFERENCE, Row, RowFormat
from ...data.left_out import template_notes
from ...data.masks import masked
from ...data.packing import Packed
from ...data.preference_batches import (
    PreferenceBatch,
    PreferenceSampler,
    preference_batch,
    preference_evaluation,
)
from ...data.preferences import (
    RATED,
    PreferenceExamples,
    both_completions,
    encode_preferences,
    joined_preferences,
)
from ...data.rows import Splits
from ...data.shapes import padded_length, sequence_inputs
from ...errors import PackError
from ...evaluation.preferences import PairScore, score_preferences
from ...gates import gates_text
from ...objectives.causal_lm import split_head
from ...objectives.phase_start import PhaseStart
from ...objectives.preference import PreferenceObjective, completion_sums, loss_of
from ...objectives.reference import Reference
from ...objectives.sequence_packing import prepare_packing
from ...packs.base import Base
from ...packs.card import format_change, phase_lines
from ..fit import Fit
from ..phases import RunPhase
from ..planning import MemoryChoice
from ..precision import check_forward
from ..run_folder import reference_file
from ..settings import Run
from .causal_lm import SamplePrompt, add_noise, phase_reports, sample_lines, stored_sample
from .task import Summary, Task, bad_rows_lines, cost, evaluated, speed, try_lines
from .tokens import MASKS, PhasedDataset


@dataclass
class PreferenceDataset(PhasedDataset):
    """Preferences of all phases as tokens, two examples for each row."""

    splits: list[dict[str, PreferenceExamples]]
    _firsts: dict[int, "_FirstBatches"] = field(default_factory=dict, init=False)

    @cached_property
    def train(self) -> PreferenceExamples:
        """The training rows of all phases, those of one phase after those of another."""
        return joined_preferences([splits["train"] for splits in self.splits])

    def counts(self) -> dict[str, int]:
        """Return the number of rows by split."""
        return {key: count // 2 for key, count in super().counts().items()}

    def sampler(self, phase: RunPhase) -> PreferenceSampler:
        """Return which of all training examples each batch of a phase holds."""
        t, draw = phase.train, self.draw(phase)
        size, inputs = t.batch_size * (1 if t.packing else 2), sequence_inputs(t.max_seq_length)
        return PreferenceSampler(self.train.lengths, size, inputs, t.seed, t.packing, draw)

    def batches(self, phase: RunPhase, start: int) -> Iterator[PreferenceBatch]:
        """Batches of a phase without end, from batch number ``start``."""
        sampler, allowed = self.sampler(phase), self.allowed_shapes(phase)
        for order in sampler.batches(start):
            yield preference_batch(self.train, sampler, order, "train", allowed)

    def first(self, start: int, row: int) -> PreferenceBatch:
        """Return the batch in which a row first occurs, of the phase with ``start`` batches before it."""
        (phase,) = (phase for phase in self.phases if phase.start == start)
        sampler = self.sampler(phase)
        number = self._firsts.setdefault(start, _FirstBatches(sampler)).number(row)
        order = next(sampler.batches(number))
        return preference_batch(self.train, sampler, order, "train", self.allowed_shapes(phase))

    def rows(self, batch: PreferenceBatch) -> list[str]:
        """Return the rows of a batch as messages name them."""
        return [self.train.items[2 * row].where for row in batch.rows]

    def held_out(self, phase: RunPhase) -> list[PreferenceBatch]:
        """Return the rows that a phase is evaluated on, in batches."""
        split, _ = self.held_out_examples(phase)
        if phase.train.test_batches is None:
            return self._evaluated(phase, split, -1, self.sampled(phase))
        return self._evaluated(phase, split, phase.train.test_batches)

    def validation(self, phase: RunPhase) -> list[PreferenceBatch]:
        """Return the rows on which a phase is validated while it trains; they may be empty."""
        splits, count = self.splits[self.phases.index(phase)], phase.train.val_batches
        return self._evaluated(phase, "valid", count) if "valid" in splits and count else []

    def _held_out_lengths(self, phase: RunPhase) -> np.ndarray:
        return super()._held_out_lengths(phase).reshape(-1, 2).sum(axis=1)

    def _evaluated(
        self, phase: RunPhase, split: str, most: int, chosen: np.ndarray | None = None
    ) -> list[PreferenceBatch]:
        t, examples = phase.train, self.splits[self.phases.index(phase)][split]
        inputs, name = sequence_inputs(t.max_seq_length), f"{phase.name}/{split}"
        return preference_evaluation(examples, t.batch_size, inputs, name, most, chosen)

    def typical_rows(self) -> tuple[int, int]:
        """Return the tokens of a typical batch, and those of them that reach the head."""
        t, lengths = self.phases[-1].train, self.train.lengths
        width = padded_length(int(sorted(lengths)[len(lengths) // 2]), t.max_seq_length)
        rows = t.sequences * (sequence_inputs(t.max_seq_length) if t.packing else width)
        return rows, max(1, rows * self.train.targets // int(lengths.sum()))


class _FirstBatches:
    """The number of the batch in which each row first occurs, examples as far as it is asked for."""

    def __init__(self, sampler: PreferenceSampler) -> None:
        self._orders, self._next = sampler.batches(), 0
        self._numbers: dict[int, int] = {}

    def number(self, row: int) -> int:
        """Return the number of the first batch with a row, which has one."""
        while row not in self._numbers:
            order = next(self._orders)
            examples = order.examples if isinstance(order, Packed) else order
            for example in examples[::2]:
                self._numbers.setdefault(int(example) // 2, self._next)
            self._next += 1
        return self._numbers[row]


class PreferenceTask(Task):
    """``--task dpo``, ``orpo``, ``simpo``, ``cpo`` and ``kto``."""

    validated = PairScore.numbers

    base: Base
    dataset: PreferenceDataset
    sample: SamplePrompt
    sample_before: str | None = None

    @property
    def train(self) -> TrainConfig:
        """The settings of the last phase, whose task is this one."""
        return self.run.goal.train

    def encode(self, base: Base, splits: Sequence[Splits]) -> PreferenceDataset:
        """Return the tokens of the rows of every phase."""
        self.base, display = base, self.run.display
        encoded: list[dict[str, PreferenceExamples]] = []
        for phase, read in zip(self.run.phases, splits, strict=True):
            t, columns, of_phase = phase.train, phase.sources[0], {}
            if phase.name:
                display.line("phase", f"{phase.name}: {t.iters:,} batches")
            options = EncodingOptions(max_seq_length=t.max_seq_length, vocab_size=base.vocab_size)
            present = read.present()
            with display.task("data", len(present), "splits") as bar:
                for split in present:
                    rows = read.rows[split]
                    examples = self._encoded(rows, columns, options)
                    read.note_encoded(split, examples.fingerprint, examples.bad)
                    of_phase[split] = examples
                    bar.advance()
            lost = template_notes(read.rows["train"], self._row_format(), columns, base.tokenizer)
            self._describe(read, of_phase, t, lost)
            encoded.append(of_phase)
        self.dataset = self._dataset(encoded)
        self._choose_sample(splits[-1])
        return self.dataset

    def _encoded(
        self, rows: Sequence[Row], columns: DataConfig, options: EncodingOptions
    ) -> PreferenceExamples:
        """Return the tokens of rows."""
        return encode_preferences(
            rows, self.base.tokenizer, columns, options, self._row_format(), self.train.num_proc
        )

    def _row_format(self) -> RowFormat:
        """Return the format of the rows of this task."""
        return RATED if self.train.task == "kto" else PREFERENCE

    def _dataset(self, encoded: list[dict[str, PreferenceExamples]]) -> PreferenceDataset:
        """Return the data set of the examples of every phase."""
        examples, tokenizer = encoded[-1]["train"].items, self.base.tokenizer
        masks = [masked(examples[i], tokenizer) for i in range(min(MASKS, len(examples)))]
        return PreferenceDataset(self.run.phases, encoded, masks=masks)

    def _describe(
        self,
        read: Splits,
        examples: dict[str, PreferenceExamples],
        train: TrainConfig,
        lost: Sequence[str],
    ) -> None:
        """Show the number of rows, and what was cut; check that packed rows fit."""
        first, display = examples["train"], self.run.display
        counts = " / ".join(f"{len(part) // 2:,} {split}" for split, part in examples.items())
        targets = self._targets_line(first)
        display.line("data", f"{read.source} · {counts} examples · {first.format} · {targets}")
        cut, dropped = (
            sum(getattr(e, key) for e in examples.values()) for key in ("cut", "dropped")
        )
        if line := self._cut_line(cut, dropped, train.max_seq_length):
            display.line("data", line)
        for note in (*read.notes, *lost, *read.bad_lines()):
            display.line("data", note)
        longest = int((first.lengths.reshape(-1, 2).sum(axis=1) - 2).max())
        if train.packing and longest > sequence_inputs(train.max_seq_length):
            raise PackError(
                f"--packing: both completions of an example share a sequence, and the longest need "
                f"{longest + 2} tokens. Pass --max-seq-length {longest + 2}, or leave --packing out.",
                "conflict",
                "max_seq_length",
            )

    def _targets_line(self, examples: PreferenceExamples) -> str:
        """Return how much of the examples is trained on."""
        return f"{examples.targets:,} supervised tokens"

    def _cut_line(self, cut: int, dropped: int, limit: int) -> str:
        """Return what was cut or dropped for its length; empty if nothing was."""
        lost = f", {dropped} examples dropped, since no target was left" if dropped else ""
        return f"longer than {limit} tokens (--max-seq-length): {cut} completions cut{lost}" * (
            cut > 0
        )

    def _choose_sample(self, splits: Splits) -> None:
        """Take the prompt of the first held-out row for the sample."""
        split, _ = self.dataset.held_out_examples(self.run.goal)
        row, columns = splits.first_usable(split), self.run.goal.sources[0]
        if self.train.task != "kto":
            row = both_completions([row], columns)[0]
        prompt = COMPLETION.prompt(row, columns, self.base.tokenizer)
        self.sample = SamplePrompt(*prompt, COMPLETION.answer(row, columns))

    def objective(self, trainable: Trainable, memory: MemoryChoice) -> PreferenceObjective:
        """Return the loss of the rows. The sample prompt is completed here, before training."""
        run, train = self.run, self.train
        head = split_head(trainable.model)
        check_forward(self.base, self.sample.tokens)
        if train.packing:
            prepare_packing(trainable, head, train.max_seq_length, self.base.vocab_size)
        with trainable.disabled():
            self.sample_before = self.sample.complete(self.base)
        if train.neftune_noise_alpha:
            add_noise(trainable, train.neftune_noise_alpha)
        start = phase_start(run, trainable)
        reference = Reference(
            trainable.model,
            start,
            lambda rows, arrays: completion_sums(trainable.model, head, rows, arrays)[0],
            self.dataset.first,
        )
        return PreferenceObjective(trainable.model, head, train, reference, score_preferences)

    def summary(
        self, trainable: Trainable, objective: PreferenceObjective, fit: Fit, sources: Sequence[str]
    ) -> Summary:
        """Accuracy and margin on the held-out rows of the last phase, and the sample again."""
        goal, train = self.run.goal, self.train
        ends = {"before": fit.scores[0][goal.name], "after": fit.scores[-1][goal.name]}
        split, examples = self.dataset.held_out_examples(goal)
        texts = {"before": self.sample_before, "after": self.sample.complete(self.base)}
        sample = {"prompt": self.sample.text, "wanted": self.sample.wanted, **texts}
        phases = phase_reports(self.dataset, sources, fit)
        facts: dict = {"phases": phases} if phases else {}
        if any(texts.values()):
            facts["samples"] = [stored_sample(sample)]
        named = {"task": train.task, "loss_on": "completion", "beta": train.beta}
        if train.task in ("dpo", "cpo"):
            named["loss"] = loss_of(train)
        values = {
            "preference_accuracy": "accuracy",
            "reward_margin": "margin",
            "loss": "nll",
            "chosen_ppl": "ppl",
        }
        return Summary(
            eval={
                "split": split,
                "available": len(examples) // 2,
                **before_and_after(ends, values),
            },
            objective=named,
            facts=facts,
            report={"task": train.task, "phases": phases, "objective": named, "sample": sample},
        )

    @staticmethod
    def report_lines(report: dict) -> list[str]:
        """Return accuracy and margin, phases, speed, the sample and the pack."""
        return outcome_lines(report)


def before_and_after(ends: Mapping[str, PairScore], names: Mapping[str, str]) -> dict:
    """Return the number of rows and, by name, a value of the scores before and after a run.

    Args:
        ends: the scores ``before`` and ``after``.
        names: the attribute of a score, by what reports call it.
    """
    return {
        "rows": ends["after"].rows,
        **{
            f"{name}_{when}": getattr(score, key)
            for name, key in names.items()
            for when, score in ends.items()
        },
    }


def phase_start(run: Run, trainable: Trainable) -> PhaseStart:
    """Return the model as the phases of a run begin, whose parameters the run folder has."""
    bare = not run.begins_with_adapters
    return PhaseStart(trainable, lambda start: reference_file(run.folder, start), bare)


def outcome_lines(report: dict) -> list[str]:
    """Return metrics before and after, phases, speed, the sample and the pack."""
    held_out = report["held_out"]
    return [
        f"done    held-out {format_change(report)} on {evaluated(held_out)}"
        f"{gates_text(report['gates'])}",
        *(f"phase   {line}" for line in phase_lines(report["phases"])),
        *bad_rows_lines(report),
        f"speed   {speed(report)} · {cost(report)}",
        *sample_lines(report["sample"]),
        *try_lines(report, report["sample"].get("prompt")),
    ]
