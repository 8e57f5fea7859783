"""Examples of all phases as tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import mlx.nn as nn
import numpy as np

from ... import runtime
from ...config.data import DataConfig
from ...config.schema import TrainConfig
from ...data import rows as rows_of
from ...data.batches import (
    Allowed,
    Batch,
    batch_shapes,
    evaluation_batches,
    few_shapes,
    most_targets,
    training_batches,
)
from ...data.encoding import EncodingOptions, Examples
from ...data.encoding_parts import part_count
from ...data.fim import FillInTheMiddle
from ...data.formats import RowFormat, Text
from ...data.left_out import template_notes
from ...data.masks import masked
from ...data.sampler import Draw, Sampler, packing_fill
from ...data.shapes import padded_length, sequence_inputs
from ...data.sources import as_rows
from ...data.token_cache import encode_cached
from ...data.token_store import JoinedExamples
from ...display import VERBOSE, Display
from ...errors import PackError
from ...nn.blocks import attends_by_spans
from ...packs.base import Base
from ..held_out import sample
from ..phases import RunPhase

MASKS = 2  # training examples that the page of a run shows


@dataclass
class PhasedDataset:
    """Examples of all phases as tokens; ``splits`` has those of each phase by split."""

    phases: tuple[RunPhase, ...]
    splits: list[dict[str, Examples]]
    by_spans: bool = False  # whether the model's attention needs no mask of segments
    masks: Sequence[dict] = ()  # some training examples of the last phase (`data.masks`)
    _allowed: dict[int, Allowed] = field(default_factory=dict, init=False)

    @cached_property
    def train(self) -> Examples:
        """The training examples of all phases, those of one phase after those of another."""
        parts = [splits["train"] for splits in self.splits]
        if len(parts) == 1:
            return parts[0]
        formats = dict.fromkeys(part.format for part in parts)
        losses = dict.fromkeys(part.loss_on for part in parts)
        items = JoinedExamples([part.items for part in parts])
        joined = Examples(items, " + ".join(formats), " + ".join(losses))
        joined.lengths = np.concatenate([part.lengths for part in parts])
        joined.target_counts = np.concatenate([part.target_counts for part in parts])
        return joined

    @property
    def loss_on(self) -> str:
        """Which tokens of its examples the last phase is trained on."""
        return self.splits[-1]["train"].loss_on

    def counts(self) -> dict[str, int]:
        """Return the number of examples by split."""
        return {
            phase.manifest_key(split): len(examples)
            for phase, splits in zip(self.phases, self.splits, strict=True)
            for split, examples in splits.items()
        }

    def draw(self, phase: RunPhase) -> Draw:
        """Return which of all training examples a phase draws its batches from."""
        edges = np.cumsum([0, *(len(splits["train"]) for splits in self.splits)]).tolist()
        i = self.phases.index(phase)
        return Draw(edges[i], edges[i + 1], phase.replay)

    def sampler(self, phase: RunPhase) -> Sampler:
        """Return which of all training examples each batch of a phase holds."""
        t, draw = phase.train, self.draw(phase)
        inputs = sequence_inputs(t.max_seq_length)
        aligned = t.packing and self.by_spans and not draw.replay
        return Sampler(self.train.lengths, t.batch_size, inputs, t.seed, t.packing, draw, aligned)

    def allowed_shapes(self, phase: RunPhase) -> Allowed | None:
        """Return the shapes of a phase's batches where each shape costs a compilation."""
        sampler = self.sampler(phase)
        if not runtime.COMPILES or (sampler.packing and not sampler.aligned):
            return None
        number = self.phases.index(phase)  # the plan and the loop ask for them: seconds of many
        if number not in self._allowed:
            choose = most_targets if sampler.aligned else few_shapes
            self._allowed[number] = choose(self.train, sampler)
        return self._allowed[number]

    def shapes(self) -> set[tuple[int, int]]:
        """(T, M) of all batches of the run."""
        shapes = set()
        for phase in self.phases:
            allowed = self.allowed_shapes(phase)
            shapes |= batch_shapes(self.train, self.sampler(phase), phase.train.iters, allowed)
        return shapes

    def batches(self, phase: RunPhase, start: int) -> Iterator[Batch]:
        """Batches of a phase without end, from batch number ``start``."""
        return training_batches(self.train, self.sampler(phase), start, self.allowed_shapes(phase))

    def batches_per_epoch(self) -> int:
        """Return the number of batches that hold every training example once."""
        return len(self.sampler(self.phases[-1]).epoch(0))

    def mean_inputs(self) -> float | None:
        """Return the mean of the tokens of a training batch; None where batches are packed."""
        train = self.phases[-1].train
        if train.packing:
            return None
        inputs = np.minimum(self.train.lengths - 1, sequence_inputs(train.max_seq_length))
        return train.sequences * float(inputs.mean())

    def resized(self, phases: Sequence[RunPhase]) -> "PhasedDataset":
        """Return the same examples for phases with other numbers of batches."""
        return replace(self, phases=tuple(phases))

    def rows(self, batch: Batch) -> list[str]:
        """Return the rows of a batch as messages name them."""
        return [self.train.items[i].where for i in batch.examples]

    def held_out_examples(self, phase: RunPhase) -> tuple[str, Examples]:
        """Return the split that a phase is evaluated on, and its examples."""
        splits = self.splits[self.phases.index(phase)]
        split = "test" if "test" in splits else "valid"
        return split, splits[split]

    def held_out(self, phase: RunPhase) -> list[Batch]:
        """Return the examples that a phase is evaluated on, in batches."""
        _, examples = self.held_out_examples(phase)
        if phase.train.test_batches is None:
            return _batches(examples, phase, -1, self.sampled(phase))
        return _batches(examples, phase, phase.train.test_batches)

    def sampled(self, phase: RunPhase) -> np.ndarray:
        """Return the held-out rows that a phase is evaluated on by default, in random order."""
        t = phase.train
        length = t.max_seq_length if t.packing else float(self.train.lengths.mean())
        return sample(self._held_out_lengths(phase), t.iters * t.sequences * length)

    def _held_out_lengths(self, phase: RunPhase) -> np.ndarray:
        return self.held_out_examples(phase)[1].lengths

    def validation(self, phase: RunPhase) -> list[Batch]:
        """Return the examples on which a phase is validated while it trains; they may be empty."""
        splits, count = self.splits[self.phases.index(phase)], phase.train.val_batches
        return _batches(splits["valid"], phase, count) if "valid" in splits and count else []

    def typical_rows(self) -> tuple[int, int]:
        """Return the tokens of a typical batch, and those of them that reach the head."""
        train = self.phases[-1].train
        lengths = np.sort(self.train.lengths)
        width = padded_length(int(lengths[len(lengths) // 2]), train.max_seq_length)
        rows = train.batch_size * (
            sequence_inputs(train.max_seq_length) if train.packing else width
        )
        return rows, max(1, rows * self.train.targets // int(lengths.sum()))


def _batches(
    examples: Examples, phase: RunPhase, count: int, chosen: np.ndarray | None = None
) -> list[Batch]:
    t = phase.train
    few = runtime.COMPILES
    return evaluation_batches(examples, t.batch_size, t.max_seq_length, count, few, chosen)


def encode_phases(
    phases: Sequence[RunPhase],
    splits: Sequence[rows_of.Splits],
    base: Base,
    train: TrainConfig,
    display: Display,
) -> PhasedDataset:
    """Encode the examples of every phase."""
    for_texts = {"--fim-rate": train.fim_rate, "--long-rows split": train.long_rows == "split"}
    formats = {read.format for read in splits}
    if not any(isinstance(row_format, Text) for row_format in formats):
        for option in (name for name, is_wanted in for_texts.items() if is_wanted):
            names = ", ".join(row_format.name for row_format in formats)
            raise PackError(f"{option}: is for texts, but these examples are {names}.", "conflict")
    encoded = []
    for phase, read in zip(phases, splits, strict=True):
        if phase.name:
            replayed = (
                f", {phase.replay:.0%} of its examples from earlier phases" if phase.replay else ""
            )
            display.line("phase", f"{phase.name}: {phase.train.iters:,} batches{replayed}")
        encoded.append(encode_splits(read, base, phase.sources[0], phase.train, display))
    examples = encoded[-1]["train"].items
    masks = [masked(examples[i], base.tokenizer) for i in range(min(MASKS, len(examples)))]
    return PhasedDataset(tuple(phases), encoded, attends_by_spans(base.model), masks)


def encode_splits(
    splits: rows_of.Splits, base: Base, columns: DataConfig, train: TrainConfig, display: Display
) -> dict[str, Examples]:
    """Return the tokens of every split that has examples; show their number and what was cut."""
    present = splits.present()
    examples = {}
    counts = {split: part_count(as_rows(splits.rows[split])) for split in present}
    with display.task("data", sum(counts.values()), "parts") as bar:
        for split in present:
            done = bar.done
            examples[split], file = encode_cached(
                splits.rows[split],
                base.tokenizer,
                columns,
                encoding_options(train, split, splits.format, base.vocab_size),
                row_format=splits.format,
                num_proc=train.num_proc,
                advance=bar.advance,
            )
            for _ in range(done + counts[split] - bar.done):  # what was cached, or small
                bar.advance()
            splits.note_encoded(split, examples[split].fingerprint, examples[split].bad)
            if file is not None:
                display.line("data", f"tokens of {split} are in {file}", VERBOSE)
    first = examples["train"]
    display.line(
        "data",
        f"{splits.source} · {_counts(examples, train, base.model)} · {first.format} · {first.targets:,} "
        f"supervised tokens (loss on {first.loss_on})",
    )
    if cut := _cut(examples, train):
        display.line("data", cut)
    lost = template_notes(splits.rows["train"], splits.format, columns, base.tokenizer)
    for note in (*splits.notes, *lost, *splits.bad_lines()):
        display.line("data", note)
    return examples


def _counts(examples: dict[str, Examples], train: TrainConfig, model: nn.Module) -> str:
    """Return how many examples each split has, and how many sequences they are packed into."""
    first = examples["train"]
    if not train.packing:
        return " / ".join(f"{len(e):,} {split}" for split, e in examples.items()) + " examples"
    inputs = sequence_inputs(train.max_seq_length)
    aligned = attends_by_spans(model)
    sampler = Sampler(
        first.lengths, train.batch_size, inputs, train.seed, packing=True, aligned=aligned
    )
    number, fill = packing_fill(sampler)
    packed = f"{number:,} sequences of {train.max_seq_length} ({100 * fill:.1f} % full)"
    held_out = "".join(f" / {len(e):,} {s}" for s, e in examples.items() if s != "train")
    return f"{len(first):,} examples packed into {packed}{held_out}"


def _cut(examples: dict[str, Examples], train: TrainConfig) -> str:
    """Return how many examples are too long, and what became of them; empty where none is."""
    first, is_text = examples["train"], examples["train"].format == "text"
    cut, dropped = (sum(getattr(e, key) for e in examples.values()) for key in ("cut", "dropped"))
    if not cut:
        return ""
    text = f"longer than {train.max_seq_length} tokens (--max-seq-length): "
    if is_text and train.long_rows == "split":
        text += f"{first.cut} training examples split, {cut - first.cut} held-out examples cut"
    else:
        text += f"{cut} examples cut"
    if dropped:
        text += f", {dropped} of them dropped, since no target was left"
    if is_text and first.cut and train.long_rows != "split":
        text += ". --long-rows split keeps all of them"
    return text


def encoding_options(
    train: TrainConfig, split: str, row_format: RowFormat, vocab_size: int
) -> EncodingOptions:
    """Return how `encoding.encode` encodes the examples of a split.

    Held-out examples are evaluated as they are, so that their perplexity does not depend on how the
    training examples are laid out; what is for texts leaves examples of other formats alone.
    """
    options = EncodingOptions(train.loss_on, train.max_seq_length, vocab_size)
    if split != "train":
        return options
    options = replace(options, ce_last_k=train.ce_last_k)
    if not isinstance(row_format, Text):
        return options
    fim = FillInTheMiddle(train.fim_rate, train.fim_spm_rate, train.seed, train.fim_tokens)
    return replace(options, long_rows=train.long_rows, fim=fim if train.fim_rate else None)
