"""Embeddings of sentences, by an encoder or a decoder: sentence pairs in, adapters out."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ..bases.encoder import Embedder
from ..config.choices import LOSSES, POLICIES, PolicyFacts, architecture_of
from ..config.schema import TrainConfig
from ..data.dataset import Batch, Dataset
from ..data.pairs import (
    PairCollate,
    PairSampler,
    check_loss_settings,
    choose_loss,
    encode_pairs,
)
from ..data.rows import Splits
from ..data.sampler import Draw
from ..data.task_formats import PairFormat
from ..data.texts import TextGroups, doubling_widths
from ..errors import PackError, flag_of
from ..evaluation.embeddings import VALIDATED, check_scores, score_pairs, validated_entries
from ..evaluation.scores import MetricScore
from ..objectives.embedding import DecoderVectors, EmbeddingObjective
from ..objectives.objective import Objective
from ..objectives.score import check_best
from ..packs.base import Base
from .phases import PhaseData, RunPhase, encode_each
from .task import Binding, Summary, Trained
from .texts import NamedLossTask


class EmbeddingTask(NamedLossTask):
    """``--task embedding``."""

    validated = VALIDATED
    examples_are = "sentence pairs"
    most_held_out = 1000

    unplanned_recompute = "none"
    embedder: Embedder
    query_prompt: str  # before every anchor

    def check(self, name: str, model_type: str) -> None:
        super().check(name, model_type)
        if architecture_of(model_type) == "encoder":
            self._check_of_encoder()

    def _check_of_encoder(self) -> None:
        train = self.train
        if misplaced := train.unfit_for_dense():
            flags = ", ".join(map(flag_of, misplaced))
            raise PackError(
                f"{flags}: not with --task embedding on an encoder, which is dense in float32. "
                "Leave it out.",
                "conflict",
            )

        if train.trains_base and self.lora.num_layers > 0:
            raise PackError(
                "--num-layers: --method full trains all of an encoder. Leave it out.", "conflict"
            )

        policy = POLICIES.get(train.recomputes, PolicyFacts())
        if policy.operations and not policy.blocks:
            raise PackError(
                f"--recompute {train.recomputes}: an encoder's blocks have only none and block.",
                "unsupported",
            )

    def encode(
        self, base: Base, phases: Sequence[RunPhase], splits: Sequence[Splits]
    ) -> list[PhaseData]:
        self.embedder = base.embedder
        self.limit = self.longest_text(self.train)
        self.query_prompt = self._query_prompt_of(base, splits[0])
        (data,) = super().encode(base, phases, splits)

        source = f"--data {splits[0].source}"
        check_scores(data.held_out.examples, source)
        if validation := data.validation:
            check_scores(validation.examples, f"{source}: valid")
            check_best(self.train.best, validated_entries(validation.examples))
        return [data]

    def longest_text(self, train: TrainConfig) -> int:
        return min(train.max_seq_length, self.embedder.vectors.longest)

    def encoded(self, phase: RunPhase, read: Splits) -> dict[str, TextGroups]:
        tokenizer = self.embedder.tokenizer
        on_bad_row = phase.columns.on_bad_row

        def encode(split: str, _: Callable[[], None]) -> TextGroups:
            rows = read.rows[split]
            return encode_pairs(rows, tokenizer, self.limit, on_bad_row, self.query_prompt)

        pairs = encode_each(read, encode, self.display)
        self.loss = choose_loss(self.train.loss, pairs["train"], f"--data {read.source}")
        check_loss_settings(self.loss, self.train)
        return pairs

    def described(self, examples: Mapping[str, TextGroups]) -> str:
        text = f"{super().described(examples)} · loss {self.loss}"
        if self.query_prompt:
            text += f" · before every anchor {self.query_prompt!r}"
        return text

    def training(self, phase: RunPhase, examples: TextGroups, draw: Draw) -> Dataset:
        train = phase.train
        in_batch = LOSSES[self.loss].in_batch
        sampler = self._sampler(examples, train.seed, in_batch)
        if in_batch and not examples.format.has_negatives:
            if train.batch_size < 2 or not sampler.epoch(0):
                raise PackError(
                    f"--loss {self.loss}: the other examples of a batch are the negatives, so it "
                    "needs --batch-size 2 or more, and examples whose texts differ.",
                    "data",
                )
        collate = PairCollate(train.batch_size, self.limit, doubling_widths(self.limit))
        return Dataset(examples, collate, sampler)

    def _query_prompt_of(self, base: Base, read: Splits) -> str:
        """Return the specified prompt, or the prompt in a decoder's files if rows have anchors."""
        if self.train.query_prompt is not None:
            return self.train.query_prompt

        has_anchors = isinstance(read.format, PairFormat) and read.format.has_anchors
        if base.architecture != "decoder" or not has_anchors:
            return ""
        return base.embedder.query_prompt

    def typical_rows(self, data: PhaseData) -> tuple[int, int] | None:
        if self.base.architecture == "encoder":
            return None

        return super().typical_rows(data)[0], 1

    def _sampler(self, pairs: TextGroups, seed: int, distinct: bool) -> PairSampler:
        return PairSampler.of(pairs, self.train.batch_size, self.limit, seed, distinct)

    def evaluation(self, phase: RunPhase, examples: TextGroups, chosen: np.ndarray) -> Dataset:
        """Return pairs for the metrics, in batches for the loss."""
        pairs = examples.select(np.sort(chosen))
        sampler = self._sampler(pairs, 0, LOSSES[self.loss].in_batch)
        if not sampler.epoch(0):  # one pair, or all alike
            sampler = self._sampler(pairs, 0, False)
        return Dataset(pairs, PairCollate(phase.train.batch_size, self.limit), sampler)

    def bind(self, binding: Binding) -> list[Objective]:
        vectors = binding.trainable.model
        if self.base.architecture == "decoder":
            vectors = DecoderVectors(self.base, vectors)
        return [EmbeddingObjective(vectors, self.loss, self.train, self.score)]

    def score(
        self,
        objective: EmbeddingObjective,
        batches: Sequence[Batch],
        examples: TextGroups | None = None,
    ) -> MetricScore:
        """Return the metrics of held-out examples, and the loss of batches."""
        objective.model.eval()
        loss = objective.mean_loss(batches)
        if examples is None:
            return MetricScore(loss, {})
        metrics = score_pairs(objective.model, examples, self.train.batch_size)
        return MetricScore(loss, metrics, len(examples))

    def summary(self, trained: Trained) -> Summary:
        objective = self.embedder.vectors.sentence_config.to_json()
        if self.query_prompt or self.train.query_prompt is not None:
            objective["query_prompt"] = self.query_prompt
        return self.summary_of(trained, objective)
