"""Embeddings of sentences, by an encoder or a decoder: sentence pairs in, adapters out."""

from collections.abc import Callable, Sequence

import numpy as np

from ..bases.encoder import Embedder
from ..config.choices import LOSSES, POLICIES, PolicyFacts, architecture_of
from ..data.dataset import Batch, Dataset
from ..data.pairs import (
    PairCollate,
    PairSampler,
    check_loss_settings,
    choose_loss,
    encode_pairs,
)
from ..data.rows import Splits
from ..data.task_formats import PairFormat
from ..data.texts import TextGroups, doubling_widths
from ..errors import PackError, flag_of
from ..evaluation.embeddings import VALIDATED, check_scores, score_pairs, validated_entries
from ..evaluation.scores import MetricScore
from ..objectives.embedding import DecoderVectors, EmbeddingObjective
from ..objectives.objective import Objective
from ..objectives.score import check_best
from ..packs.base import Base
from .phases import PhaseData, RunPhase, counted, encode_each, show_cut, show_notes
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
        (phase,) = phases
        (read,) = splits
        train = self.train
        display = self.display
        embedder = base.embedder
        self.limit = min(train.max_seq_length, embedder.vectors.longest)
        self.query_prompt = self._query_prompt_of(base, read)

        def encode(split: str, _: Callable[[], None]) -> TextGroups:
            on_bad_row = phase.columns.on_bad_row
            rows = read.rows[split]
            return encode_pairs(rows, embedder.tokenizer, self.limit, on_bad_row, self.query_prompt)

        pairs = encode_each(read, encode, display)
        first = pairs["train"]
        loss = choose_loss(train.loss, first, f"--data {read.source}")
        check_loss_settings(loss, train)
        self.base = base
        self.embedder = embedder
        self.loss = loss

        sampler = self._sampler(first, train.seed, LOSSES[loss].in_batch)
        if LOSSES[loss].in_batch and not first.format.has_negatives:
            if train.batch_size < 2 or not sampler.epoch(0):
                raise PackError(
                    f"--loss {loss}: the other examples of a batch are the negatives, so it needs "
                    "--batch-size 2 or more, and examples whose texts differ.",
                    "data",
                )

        counts = counted(pairs)
        display.line(
            "data", f"{read.source} · {counts} examples · {first.format.name} · loss {loss}"
        )
        if self.query_prompt:
            display.line("data", f"before every anchor: {self.query_prompt!r}")
        show_cut(pairs, self.limit, "texts", display)
        show_notes(read, phase.columns, embedder.tokenizer, display)

        collate = PairCollate(train.batch_size, self.limit, doubling_widths(self.limit))
        data = PhaseData(self, phase, pairs, Dataset(first, collate, sampler))
        check_scores(data.held_out.examples, f"--data {read.source}")
        if validation := data.validation:
            check_scores(validation.examples, f"--data {read.source}: valid")
            check_best(train.best, validated_entries(validation.examples))
        return [data]

    def _query_prompt_of(self, base: Base, read: Splits) -> str:
        """Return the specified prompt, or that of a decoder's own files if rows have anchors."""
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
