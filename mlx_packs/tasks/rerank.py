"""Reranking: whether a document answers a query, by a decoder's yes and no or by a new head."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from .. import runtime
from ..adapters.spec import SCORE
from ..config.choices import TASKS
from ..config.lora import LoRAConfig
from ..data.dataset import Dataset, by_length
from ..data.rankings import (
    INSTRUCTION,
    RankingCollate,
    RerankPrompt,
    answer_tokens,
    encode_rankings,
)
from ..data.rows import Splits
from ..data.sampler import Sampler
from ..data.texts import TextGroups
from ..evaluation.rankings import VALIDATED, score_rankings
from ..evaluation.scores import Metrics
from ..objectives.objective import Objective
from ..objectives.rerank import Reranking, scorer_of
from ..packs.base import Base
from .phases import PhaseData, RunPhase
from .splits import counted, encode_each, show_cut, show_notes
from .task import Binding, Summary, Trained
from .texts import TextsTask


class RerankTask(TextsTask):
    """``--task rerank``."""

    validated = VALIDATED
    examples_are = "rankings"
    most_held_out = 200

    @property
    def head_name(self) -> str:
        return self.train.head_of("rerank")

    def target(self, base: Base) -> tuple[Base, LoRAConfig]:
        """Return the base, with a head besides that is trained in full if there is one."""
        if self.head_name == "lm":
            return base, self.lora
        return self.with_trained_head(base)

    def encode(
        self, base: Base, phases: Sequence[RunPhase], splits: Sequence[Splits]
    ) -> list[PhaseData]:
        (phase,) = phases
        (read,) = splits
        train = self.train
        if self.head_name == "lm":
            answer_tokens(base.tokenizer)
        self.limit = min(train.max_seq_length, base.text_limit)
        prompt = RerankPrompt(base.tokenizer, self.instruction, self.limit)

        def encode(split: str, _: Callable[[], None]) -> TextGroups:
            return encode_rankings(read.rows[split], prompt, phase.columns.on_bad_row)

        rankings = encode_each(read, encode, self.display)
        first = rankings["train"]
        self.base = base
        self.loss = train.loss
        if train.loss == "auto":
            graded = not np.isin(first.labels, (-1, 0, 1)).all()
            self.loss = "listnet" if graded else "infonce"

        self._describe(phase, read, rankings)

        collate = RankingCollate(train.batch_size, self.limit, runtime.COMPILES)
        sampler = Sampler(first.lengths, train.batch_size, self.limit, train.seed)
        return [PhaseData(self, phase, rankings, Dataset(first, collate, sampler))]

    @property
    def instruction(self) -> str:
        return self.train.rerank_instruction or INSTRUCTION

    def _describe(self, phase: RunPhase, read: Splits, rankings: dict[str, TextGroups]) -> None:
        first = rankings["train"]
        counts = counted(rankings)
        documents = f"{first.sizes.mean():.1f} documents each"
        self.display.line(
            "data",
            f"{read.source} · {counts} queries · {first.format.name} · {documents} "
            f"· loss {self.loss}, scores by the {self.head_name} head",
        )

        show_cut(rankings, self.train.max_seq_length, "documents", self.display)
        show_notes(read, phase.columns, self.base.tokenizer, self.display)

    def evaluation(self, phase: RunPhase, examples: TextGroups, chosen: np.ndarray) -> Dataset:
        own = examples.select(np.sort(chosen))
        size = phase.train.batch_size
        collate = RankingCollate(size, self.limit)
        return Dataset(own, collate, by_length(own.lengths, size, np.arange(len(own))))

    def typical_rows(self, data: PhaseData) -> tuple[int, int]:
        """Return the tokens of a typical batch, and those that reach the head."""
        inputs = self.typical_inputs(data)
        documents = round(self.train.batch_size * float(data.train.examples.sizes.mean()))
        return max(1, documents * inputs), max(1, documents)

    def bind(self, binding: Binding) -> list[Objective]:
        model = binding.trainable.model
        head = model[SCORE] if self.head_name == "score" else None

        scorer = scorer_of(replace(self.base, model=model), head)
        return [Reranking(scorer, self.loss, self.train, self.score)]

    def metrics(self, objective: Reranking, examples: TextGroups) -> Metrics:
        documents = self.train.batch_size * TASKS["rerank"].sequences
        return score_rankings(objective.scorer, examples, documents)

    def summary(self, trained: Trained) -> Summary:
        objective = {"instruction": self.instruction, "head": self.head_name}
        return self.summary_of(trained, objective)
