"""Reranking: whether a document answers a query, by the yes and no of a decoder's own head."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from .. import runtime
from ..adapters.trainable import Trainable
from ..config.choices import TASKS
from ..config.data import COLUMN_SETTINGS
from ..config.schema import TrainConfig
from ..data.dataset import Batch, Dataset, by_length
from ..data.rankings import (
    INSTRUCTION,
    RankingCollate,
    Rankings,
    RerankPrompt,
    answer_tokens,
    encode_rankings,
)
from ..data.rows import Splits
from ..data.sampler import Sampler
from ..data.shapes import padded_length
from ..errors import PackError, flag_of
from ..evaluation.rankings import RankScore, score_rankings, shown
from ..gates import gates_text
from ..memory.memory_choice import MemoryChoice
from ..objectives.objective import Objective
from ..objectives.rerank import Reranking, YesOrNo
from ..packs.base import Base
from .phases import PhaseData, RunPhase
from .task import PhaseStarts, Summary, Task, Trained, bad_rows_lines, cost, evaluated

_MOST_QUERIES = 200  # that a run is evaluated on by default


class RerankTask(Task):
    """``--task rerank``."""

    validated = RankScore.numbers

    base: Base
    loss: str  # its name

    def check(self, name: str, model_type: str) -> None:
        super().check(name, model_type)
        if misplaced := self.columns.changed(COLUMN_SETTINGS):
            flags = ", ".join(map(flag_of, misplaced))
            text = f"{flags}: not with --task rerank, whose examples are rankings. Leave it out."
            raise PackError(text, "conflict")

    def encode(
        self, base: Base, phases: Sequence[RunPhase], splits: Sequence[Splits]
    ) -> list[PhaseData]:
        """Encode the queries of every split; show what was cut."""
        (phase,) = phases
        (read,) = splits
        train = self.train
        present = read.present()
        answer_tokens(base.tokenizer)
        prompt = RerankPrompt(base.tokenizer, self.instruction, train.max_seq_length)

        rankings = {}
        with self.display.task("data", len(present), "splits") as bar:
            for split in present:
                rows = read.rows[split]
                rankings[split] = encode_rankings(rows, prompt, phase.sources[0].on_bad_row)
                read.note_encoded(split, rankings[split].fingerprint, rankings[split].bad)
                bar.advance()

        first = rankings["train"]
        self.base = base
        self.loss = train.loss
        if train.loss == "auto":
            graded = any(label not in (0, 1) for labels in first.labels for label in labels)
            self.loss = "listnet" if graded else "infonce"

        self._describe(read, rankings)

        collate = RankingCollate(train.batch_size, train.max_seq_length, runtime.COMPILES)
        sampler = Sampler(first.lengths, train.batch_size, train.max_seq_length, train.seed)
        return [PhaseData(self, phase, rankings, Dataset(first, collate, sampler))]

    @property
    def instruction(self) -> str:
        return self.train.rerank_instruction or INSTRUCTION

    def _describe(self, read: Splits, rankings: dict[str, Rankings]) -> None:
        first = rankings["train"]
        counts = " / ".join(f"{len(part):,} {split}" for split, part in rankings.items())
        documents = first.documents.mean()
        self.display.line(
            "data",
            f"{read.source} · {counts} queries · {first.format} · {documents:.1f} documents each "
            f"· loss {self.loss}",
        )

        if cut := sum(part.cut for part in rankings.values()):
            limit = self.train.max_seq_length
            text = f"longer than {limit} tokens (--max-seq-length): {cut} documents cut"
            self.display.line("data", text)
        for note in (*read.notes, *read.bad_lines()):
            self.display.line("data", note)

    def evaluation(self, phase: RunPhase, examples: Rankings, chosen: np.ndarray) -> Dataset:
        chosen = np.sort(chosen)
        own = replace(
            examples,
            tokens=[examples.tokens[i] for i in chosen],
            labels=[examples.labels[i] for i in chosen],
            where=lambda i: examples.where(int(chosen[i])),
        )

        size = phase.train.batch_size

        collate = RankingCollate(size, phase.train.max_seq_length)
        return Dataset(own, collate, by_length(own.lengths, size, np.arange(len(own))))

    def sampled(self, data: PhaseData) -> np.ndarray:
        count = data.held_out_examples.count
        return np.random.RandomState(0).permutation(count)[:_MOST_QUERIES]

    def typical_rows(self, data: PhaseData) -> tuple[int, int]:
        """Return the tokens of a typical batch, and those that reach the head."""
        lengths = np.sort(data.train.examples.lengths)
        inputs = padded_length(int(lengths[len(lengths) // 2]), self.train.max_seq_length)
        documents = round(self.train.batch_size * float(data.train.examples.documents.mean()))
        return max(1, documents * inputs), max(1, documents)

    def planned_settings(self, train: TrainConfig) -> TrainConfig:
        """Return the settings with the loss that the rows have."""
        return replace(train, loss=self.loss)

    def bind(
        self,
        trainable: Trainable,
        data: Sequence[PhaseData],
        starts: PhaseStarts,
        memory: MemoryChoice,
    ) -> list[Objective]:
        scorer = YesOrNo(trainable.model, self.base.tokenizer)
        return [Reranking(scorer, self.loss, self.train, self._score)]

    def _score(
        self,
        objective: Reranking,
        batches: Sequence[Batch],
        rankings: Rankings | None = None,
        advance: Callable[[], None] | None = None,
    ) -> RankScore:
        """Return the metrics of held-out queries, and the loss of batches."""
        objective.model.eval()
        loss = objective.mean_loss(batches, advance)
        if rankings is None:
            return RankScore(loss, {})

        documents = self.train.batch_size * TASKS["rerank"].sequences
        return RankScore(loss, *score_rankings(objective.scorer, rankings, documents))

    def summary(
        self,
        trainable: Trainable,
        data: Sequence[PhaseData],
        trained: Trained,
        sources: Sequence[str],
    ) -> Summary:
        (own,) = data
        before, after = trained.ends(own.phase)
        held_out = own.held_out().examples
        objective = {"task": "rerank", "loss": self.loss, "instruction": self.instruction}

        return Summary(
            eval={
                "split": own.held_out_split,
                "rows": len(held_out),
                "available": own.held_out_examples.count,
                **before.to_json("before"),
                **after.to_json("after"),
            },
            objective=objective,
            held_out={"format": held_out.format},
            report={"loss": self.loss},
        )

    @staticmethod
    def report_lines(report: dict) -> list[str]:
        changes = []
        for when in ("before", "after"):
            names = [name for name in ("mrr_at_10", "ndcg_at_10") if f"{name}_{when}" in report]
            metrics = {name: report[f"{name}_{when}"] for name in names}
            errors = {name: report.get(f"{name}_{when}_se") for name in names}
            changes.append(shown(metrics, errors))

        pack = report["pack"]
        return [
            f"done    held-out {' → '.join(changes)} on {evaluated(report['held_out'])}"
            f"{gates_text(report['gates'])}",
            *bad_rows_lines(report),
            f"speed   {report['queries_per_s']:,.1f} queries/s · {cost(report)}",
            f"pack    {pack} ({report['pack_mb']:.1f} MB)    try: packs eval {pack} --data …",
        ]
