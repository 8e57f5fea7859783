"""Embeddings of sentences, by an encoder: sentence pairs in, adapters on a float32 base out."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from ... import runtime
from ...adapters.trainable import Trainable
from ...bases.encoder import Encoder
from ...config.choices import LOSSES, POLICIES, PolicyFacts
from ...config.data import COLUMN_SETTINGS
from ...config.schema import TrainConfig
from ...data.left_out import left_out_notes
from ...data.pairs import (
    PairBatch,
    Pairs,
    PairSampler,
    check_loss_settings,
    choose_loss,
    encode_pairs,
    make_pair_batch,
    pair_batches,
)
from ...data.rows import Splits
from ...errors import PackError, flag_of
from ...evaluation.embeddings import (
    EmbeddingScore,
    check_scores,
    score_pairs,
    validated_entries,
)
from ...gates import gates_text
from ...objectives.embedding import EmbeddingObjective
from ...objectives.score import check_best
from ...packs.base import Base
from ...packs.card import format_change
from ..fit import Fit
from ..phases import RunPhase
from ..planning import MemoryChoice
from .task import Summary, Task, bad_rows_lines, cost, evaluated

_MOST_PAIRS = 1000  # that a run is evaluated on by default


class EvalPairs(list[PairBatch]):
    """Held-out pairs: their metrics are over all of them, their loss over some batches, or none."""

    def __init__(self, pairs: Pairs, batches: Sequence[PairBatch] = ()) -> None:
        super().__init__(batches)
        self.pairs = pairs


@dataclass(frozen=True)
class PairDataset:
    """Pairs by split, with the loss by name and the most tokens of a text."""

    masks: ClassVar[Sequence[dict]] = ()

    splits: dict[str, Pairs]
    train: TrainConfig
    loss: str
    limit: int

    @property
    def split(self) -> str:
        """The split that the run is evaluated on."""
        return "test" if "test" in self.splits else "valid"

    def counts(self) -> dict[str, int]:
        """Return the number of pairs by split."""
        return {split: len(pairs) for split, pairs in self.splits.items()}

    def shapes(self) -> set[tuple[int, int]]:
        """Return the longest text, and the columns of a pair."""
        pairs = self.splits["train"]
        return {(int(pairs.lengths.max()), len(pairs.tokens))}

    def typical_rows(self) -> None:
        """No matmul path is chosen: an encoder is dense."""

    def batches(self, phase: RunPhase, start: int) -> Iterator[PairBatch]:
        """Batches without end, from batch number ``start``."""
        pairs = self.splits["train"]
        sampler = self._sampler(pairs, self.train.seed, LOSSES[self.loss].in_batch)
        return pair_batches(pairs, sampler, start, runtime.COMPILES)

    def batches_per_epoch(self) -> int:
        """Return the number of batches that hold every training pair once."""
        pairs = self.splits["train"]
        return len(self._sampler(pairs, self.train.seed, LOSSES[self.loss].in_batch).epoch(0))

    def mean_inputs(self) -> None:
        """Texts of pairs are not counted in tokens."""

    def resized(self, phases: Sequence[RunPhase]) -> "PairDataset":
        """Return the same pairs for another number of batches."""
        return replace(self, train=phases[-1].train)

    def rows(self, batch: PairBatch) -> list[str]:
        """Return the rows of a batch as messages name them."""
        return [self.splits["train"].where(i) for i in batch.examples]

    def validation(self, phase: RunPhase) -> EvalPairs | list:
        """Return the first pairs to validate on, and batches of them for the loss."""
        if "valid" not in self.splits or not self.train.val_batches:
            return []
        pairs, size = self.first("valid", self.train.val_batches), self.train.batch_size
        order = self._sampler(pairs, 0, LOSSES[self.loss].in_batch).epoch(0)
        order = order or self._sampler(pairs, 0, False).epoch(0)  # one pair, or all alike
        return EvalPairs(pairs, [make_pair_batch(pairs, rows, size, self.limit) for rows in order])

    def held_out(self, phase: RunPhase) -> EvalPairs:
        """Return the pairs that the run is evaluated on."""
        pairs, most = self.splits[self.split], self.train.test_batches
        if most is not None:
            return EvalPairs(self.first(self.split, most))
        if len(pairs) <= _MOST_PAIRS:
            return EvalPairs(pairs)

        order = np.sort(np.random.RandomState(0).permutation(len(pairs))[:_MOST_PAIRS])
        scores = None if pairs.scores is None else pairs.scores[order]
        return EvalPairs(
            replace(
                pairs,
                tokens=[[column[i] for i in order] for column in pairs.tokens],
                texts=pairs.texts[order],
                scores=scores,
                where=lambda i: pairs.where(int(order[i])),
            )
        )

    def first(self, split: str, batches: int) -> Pairs:
        """Return the first pairs of a split, so many batches' worth; -1 is all."""
        pairs, count = self.splits[split], batches * self.train.batch_size
        if batches < 0 or count >= len(pairs):
            return pairs
        return replace(
            pairs,
            tokens=[column[:count] for column in pairs.tokens],
            texts=pairs.texts[:count],
            scores=None if pairs.scores is None else pairs.scores[:count],
        )

    def _sampler(self, pairs: Pairs, seed: int, distinct: bool) -> PairSampler:
        return PairSampler.of(pairs, self.train.batch_size, self.limit, seed, distinct)


class EmbeddingTask(Task):
    """``--task embedding``."""

    validated = EmbeddingScore.numbers

    unplanned_recompute = "none"
    base: Base
    dataset: PairDataset

    def check(self, name: str, model_type: str) -> None:
        """Accept no setting that means nothing for an encoder."""
        super().check(name, model_type)
        train, columns = self.run.train, self.run.columns
        misplaced = train.unfit_for_dense() + columns.changed(COLUMN_SETTINGS)
        if misplaced:
            flags = ", ".join(map(flag_of, misplaced))
            raise PackError(
                f"{flags}: not with --task embedding, whose base is dense in float32 and "
                "whose examples are sentence pairs. Leave it out.",
                "conflict",
            )
        if train.trains_base and self.run.lora.num_layers > 0:
            raise PackError(
                "--num-layers: --method full trains all of an encoder. Leave it out.", "conflict"
            )
        policy = POLICIES.get(train.recomputes, PolicyFacts())
        if policy.operations and not policy.blocks:
            raise PackError(
                f"--recompute {train.recomputes}: an encoder's blocks have only none and block.",
                "unsupported",
            )

    def encode(self, base: Base, splits: Sequence[Splits]) -> PairDataset:
        """Encode the pairs of every split and choose their loss; show what was cut."""
        (read,), train, display = splits, self.run.train, self.run.display
        present, limit = read.present(), min(train.max_seq_length, base.model.longest)
        pairs = {}
        with display.task("data", len(present), "splits") as bar:
            for split in present:
                on_bad_row = self.run.columns.on_bad_row
                pairs[split] = encode_pairs(read.rows[split], base.tokenizer, limit, on_bad_row)
                read.note_encoded(split, pairs[split].fingerprint, pairs[split].bad)
                bar.advance()
        first = pairs["train"]
        loss = choose_loss(train.loss, first, f"--data {read.source}")
        check_loss_settings(loss, train)
        self.base, self.dataset = base, PairDataset(pairs, train, loss, limit)
        if LOSSES[loss].in_batch and not first.format.has_negatives:
            sampler = PairSampler.of(first, train.batch_size, limit, train.seed, True)
            if train.batch_size < 2 or not sampler.epoch(0):
                raise PackError(
                    f"--loss {loss}: the other examples of a batch are the negatives, so it needs "
                    "--batch-size 2 or more, and examples whose texts differ.",
                    "data",
                )
        counts = " / ".join(f"{len(part):,} {split}" for split, part in pairs.items())
        display.line(
            "data", f"{read.source} · {counts} examples · {first.format.name} · loss {loss}"
        )
        if cut := sum(part.cut for part in pairs.values()):
            display.line("data", f"longer than {limit} tokens (--max-seq-length): {cut} texts cut")
        lost = left_out_notes(read.rows["train"], read.format, self.run.columns, base.tokenizer)
        for note in (*read.notes, *lost, *read.bad_lines()):
            display.line("data", note)
        check_scores(self.dataset.held_out(self.run.goal).pairs, f"--data {read.source}")
        if validation := self.dataset.validation(self.run.goal):
            check_scores(validation.pairs, f"--data {read.source}: valid")
            check_best(train.best, validated_entries(validation.pairs))
        return self.dataset

    def planned_settings(self) -> TrainConfig:
        """Return the settings with the loss that the pairs have."""
        return replace(self.run.train, loss=self.dataset.loss)

    def objective(self, trainable: Trainable, memory: MemoryChoice) -> EmbeddingObjective:
        """Return the loss of pairs."""
        return EmbeddingObjective(trainable.model, self.dataset.loss, self.run.train, self._score)

    def _score(
        self,
        objective: EmbeddingObjective,
        batches: Sequence[PairBatch],
        advance: Callable[[], None] | None = None,
    ) -> EmbeddingScore:
        """Return the metrics of held-out pairs, and the loss of batches."""
        model: Encoder = objective.model
        model.eval()
        metrics = {}
        if isinstance(batches, EvalPairs):
            metrics = score_pairs(model, batches.pairs, self.run.train.batch_size)
        return EmbeddingScore(objective.mean_loss(batches), metrics)

    def summary(
        self, trainable: Trainable, objective: EmbeddingObjective, fit: Fit, sources: Sequence[str]
    ) -> Summary:
        """Metrics on the held-out pairs."""
        before, after = (scores[self.run.goal.name].metrics for scores in fit.scores)
        held_out = self.dataset.held_out(self.run.goal).pairs
        task = {"task": "embedding", "loss": self.dataset.loss}
        return Summary(
            eval={
                "split": self.dataset.split,
                "rows": len(held_out),
                "available": len(self.dataset.splits[self.dataset.split]),
                **{f"{name}_before": value for name, value in before.items()},
                **{f"{name}_after": value for name, value in after.items()},
            },
            objective={**task, **self.base.model.sentence_config.to_json()},
            held_out={"format": held_out.format.name},
            report=task,
        )

    @staticmethod
    def report_lines(report: dict) -> list[str]:
        """Return metrics, speed and the pack."""
        held_out = report["held_out"]
        return [
            f"done    held-out {format_change(report)} on {evaluated(held_out)}"
            f"{gates_text(report['gates'])}",
            *bad_rows_lines(report),
            f"speed   {report['pairs_per_s']:,.0f} pairs/s · {cost(report)}",
            f"pack    {report['pack']} ({report['pack_mb']:.1f} MB)    try: packs eval "
            f"{report['pack']} --data …",
        ]
