"""Reranking: whether a document answers a query, by a decoder's yes and no or by a new head."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from ..adapters.spec import SCORE
from ..config.lora import LoRAConfig
from ..data.dataset import Dataset
from ..data.rankings import (
    INSTRUCTION,
    RankingCollate,
    RerankPrompt,
    answer_tokens,
    encode_rankings,
)
from ..data.rows import Splits
from ..data.sampler import Draw, Sampler
from ..data.texts import TextGroups, doubling_widths, texts_once
from ..evaluation.rankings import VALIDATED, score_rankings
from ..objectives.objective import Objective
from ..objectives.reader import ranking_reader
from ..objectives.text_loss import TextLoss, ranking_losses
from ..packs.base import Base
from .phases import RunPhase, encode_each
from .task import Binding, Summary, Trained
from .texts import NamedLossTask


class RerankTask(NamedLossTask):
    """``--task rerank``."""

    validated = VALIDATED
    cut_parts = "documents"
    examples_are = "rankings"
    most_held_out = 200

    @property
    def head_name(self) -> str:
        return self.train.head_of("rerank")

    @property
    def instruction(self) -> str:
        return self.train.rerank_instruction or INSTRUCTION

    def target(self, base: Base) -> tuple[Base, LoRAConfig]:
        """Return the base, with a head besides that is trained in full if there is one."""
        if self.head_name == "lm":
            return base, self.lora
        return self.with_trained_head(base)

    def encoded(self, phase: RunPhase, read: Splits) -> dict[str, TextGroups]:
        train = self.train
        tokenizer = self.base.tokenizer
        if self.head_name == "lm":
            answer_tokens(tokenizer)
        self.limit = self.longest_text(train)
        prompt = RerankPrompt(tokenizer, self.instruction, self.limit)

        def encode(split: str, _: Callable[[], None]) -> TextGroups:
            return encode_rankings(read.rows[split], prompt, phase.columns.on_bad_row)

        rankings = encode_each(read, encode, self.display)
        self.loss = train.loss
        if train.loss == "auto":
            graded = not np.isin(rankings["train"].labels, (-1, 0, 1)).all()
            self.loss = "listnet" if graded else "infonce"
        return rankings

    def described(self, examples: Mapping[str, TextGroups]) -> str:
        first = examples["train"]
        return (
            f"queries · {first.format.name} · {first.sizes.mean():.1f} documents each · loss "
            f"{self.loss}, scores by the {self.head_name} head"
        )

    def training(self, phase: RunPhase, examples: TextGroups, draw: Draw) -> Dataset:
        size = phase.train.batch_size
        collate = RankingCollate(size, self.limit, doubling_widths(self.limit))
        return Dataset(
            examples, collate, Sampler(examples.lengths, size, self.limit, phase.train.seed)
        )

    def evaluation(self, phase: RunPhase, examples: TextGroups, chosen: np.ndarray) -> Dataset:
        return texts_once(examples, RankingCollate(phase.train.batch_size, self.limit), chosen)

    def bind(self, binding: Binding) -> list[Objective]:
        model = binding.trainable.model
        head = model[SCORE] if self.head_name == "score" else None
        reader = ranking_reader(replace(self.base, model=model), head)
        losses = partial(ranking_losses, loss=self.loss, margin=self.train.rank_margin)
        return [TextLoss(reader, losses, "queries", score_rankings)]

    def summary(self, trained: Trained) -> Summary:
        objective = {"instruction": self.instruction, "head": self.head_name}
        return self.summary_of(trained, objective)
