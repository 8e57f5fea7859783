"""The next token as a teacher predicts it, by a cache or by the teacher alongside the student.

Generalized knowledge distillation (https://arxiv.org/abs/2306.13649): a share of the batches has
completions that the student generates, so that it learns where its own texts lead.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..adapters.trainable import Trainable
from ..config.choices import ANSWER_METRICS, TASKS
from ..config.recipe import Recipe
from ..config.schema import TrainConfig
from ..data.dataset import Batch, Collate, Dataset
from ..data.encoding import Example, Examples
from ..data.rows import Splits
from ..data.sampler import Draw, Order
from ..data.shapes import Shape
from ..data.teacher_cache import (
    TEACHER_ARRAYS,
    TeacherCache,
    TeacherTargets,
    tokenizer_key,
    without_teacher,
)
from ..display import Display
from ..errors import PackError
from ..evaluation.perplexity import Scorer
from ..evaluation.teacher import VALIDATED, StudentScorer
from ..objectives.causal_lm import CausalLM, Head, Preparation
from ..objectives.distillation import Distillation, DistillationObjective
from ..objectives.frozen_activations import FrozenActivations
from ..packs.base import Base
from ..runtime import mx
from .causal_lm import CausalLMTask
from .completions import (
    completed_examples,
    completions,
    generated_collate,
    largest_batch,
    random_sampler,
)
from .phases import PhaseData, RunPhase
from .task import Summary, Trained
from .teacher import Teacher, with_cached_teacher


@dataclass(frozen=True)
class TeacherCollate:
    """Lays out tokens, with what is cached of their targets, and divides both."""

    tokens: Collate
    cached: TeacherTargets | None = None  # None: a live teacher adds `TEACHER_ARRAYS` later
    generated: frozenset[Shape] = frozenset()  # shapes of batches that may be generated

    def __call__(self, examples: Examples, order: Order) -> Batch:
        batch = self.tokens(examples, order)
        return batch if self.cached is None else self.cached.having(batch)

    def shapes(self, examples: Examples, orders: Iterator[Order]) -> set[Shape]:
        return self.tokens.shapes(examples, orders) | self.generated

    def split(self, batch: Batch, parts: int) -> list[Batch]:
        pieces = self.tokens.split(without_teacher(batch), parts)
        if TEACHER_ARRAYS[0] not in batch.inputs:
            return pieces

        stops = np.cumsum([piece.targets for piece in pieces])
        return [
            _with_targets(piece, batch, int(stop) - piece.targets)
            for piece, stop in zip(pieces, stops, strict=True)
        ]


def _with_targets(piece: Batch, whole: Batch, start: int) -> Batch:
    """Return a piece with the teacher's arrays of its targets, from ``start`` in the whole."""
    slots = len(piece.inputs["targets"])
    arrays = {}
    for name in TEACHER_ARRAYS:
        values = mx.array(whole.inputs[name])[start : start + piece.targets]
        padding = [(0, slots - piece.targets), *[(0, 0)] * (values.ndim - 1)]
        arrays[name] = mx.pad(values, padding)
    return piece.having(**arrays)


class OnPolicy:
    """Replaces the completions of the data by the student's, in a share of the batches."""

    def __init__(self, student: Base, train: TrainConfig, data: Dataset) -> None:
        self._student = student
        self._train = train
        examples = data.examples
        if examples.loss_on == "all":
            raise PackError(
                f"{examples.items[0].where}: is a text without a prompt, which --on-policy would "
                "complete. Give chats, or prompts with completions.",
                "data",
                "on_policy",
            )
        longest = max(len(_prompt(each)) for each in examples.items)
        self.largest = largest_batch(train, longest)

    def takes(self, batch: Batch) -> bool:
        """Return whether a batch is of the share, by its number and the seed of the run."""
        drawn = np.random.default_rng([self._train.seed, batch.number]).random()
        return bool(drawn < self._train.on_policy)

    def generated(self, batch: Batch) -> Batch:
        """Return a batch whose completions the student generates as it is now."""
        prompts = [_prompt(batch.source[i]) for i in batch.examples]
        sampler = random_sampler(self._train, batch.number, min(batch.examples))
        model = self._student.model
        training = model.training
        generated = completions(self._student, prompts, self._train, sampler, shares=True)
        model.train(training)

        places = [batch.source[i].where for i in batch.examples]
        examples = completed_examples(prompts, generated, places)
        collate = generated_collate(self._train, self.largest, len(examples))
        laid_out = collate(examples, np.arange(len(examples)))
        return replace(
            batch,
            inputs=laid_out.inputs,
            targets=laid_out.targets,
            denominator=laid_out.denominator,
            computed=laid_out.computed,
            layout=laid_out.layout,
            starts=laid_out.starts,
        )


def _prompt(example: Example) -> list[int]:
    """Return what comes before the last completion of an example."""
    is_target = np.asarray(example.target, bool)
    last = np.flatnonzero(is_target)[-1]
    before = np.flatnonzero(~is_target[:last])
    return example.tokens[: int(before[-1]) + 1].tolist()


class DistillTask(CausalLMTask):
    """``--task distill``: as ``lm``, with another loss."""

    validated = (*VALIDATED, *(f"valid_{metric}" for metric in ANSWER_METRICS))

    shares_prefixes = False

    cache: TeacherCache | None = None
    live: Teacher | None = None  # in the place of a cache
    on_policy: OnPolicy | None = None

    def check(self, name: str, model_type: str) -> None:
        super().check(name, model_type)
        if self.train.teacher is not None:
            return

        folder = self.train.teacher_cache
        if folder is None:
            raise PackError(
                "--teacher-cache: name a folder for the log-probabilities of a teacher, and with "
                "--teacher the model that writes them. --teacher by itself is loaded alongside the "
                "student."
            )
        self.cache = TeacherCache.at(folder)

    def encode(
        self, base: Base, phases: Sequence[RunPhase], splits: Sequence[Splits]
    ) -> list[PhaseData]:
        if len(phases) > 1:
            raise PackError(
                "phases: a run has one phase of --task distill, since it has one teacher.",
                "conflict",
                "phases",
            )

        if self.train.teacher is not None:
            self.live = self._loaded(base)
        elif tokenizer_key(base.tokenizer) != self.cache.facts.tokenizer:
            raise PackError(
                f"--teacher-cache {self.cache.folder}: its teacher ({self.cache.facts.teacher}) "
                f"has another tokenizer than {base.name}. Name a student of the same family.",
                "mismatch",
            )

        self.teachers: list[tuple[Examples, TeacherTargets]] = []
        return super().encode(base, phases, splits)

    @staticmethod
    def prepared_recipe(recipe: Recipe, display: Display) -> Recipe:
        if recipe.train.teacher is None or recipe.train.teacher_cache is None:
            return recipe
        return with_cached_teacher(recipe, display)

    def planned_facts(self) -> dict[str, int]:
        if self.cache is None:
            return {"teacher_tokens": self.train.teacher_top_k}
        return {"teacher_tokens": self.cache.facts.top_k}

    def _loaded(self, student: Base) -> Teacher:
        train = self.train
        teacher = Teacher.load(train, self.display).beside(student)
        share = f"{train.on_policy:.0%} of the batches" if train.on_policy else "no batch"
        line = f"{teacher.base.summary()} · the student generates {share}"
        self.display.line("teacher", line)
        return teacher

    def training(self, phase: RunPhase, examples: Examples, draw: Draw) -> Dataset:
        data = super().training(phase, examples, draw)
        if self.live is None:
            return self._with_teacher(data)

        shapes: frozenset = frozenset()
        if self.train.on_policy:
            self.on_policy = OnPolicy(self.base, phase.train, data)
            shapes = frozenset({self.on_policy.largest})
        return dataclasses.replace(data, collate=TeacherCollate(data.collate, generated=shapes))

    def evaluation(self, phase: RunPhase, examples: Examples, chosen: np.ndarray) -> Dataset:
        return self._with_teacher(super().evaluation(phase, examples, chosen))

    def _with_teacher(self, data: Dataset) -> Dataset:
        """Add what the cache has of their split, which is checked once."""
        if self.cache is None:
            return data

        known = [targets for examples, targets in self.teachers if examples is data.examples]
        if not known:
            known = [self.cache.of(data.examples, self.base.vocab_size)]
            self.teachers.append((data.examples, known[0]))

        return dataclasses.replace(data, collate=TeacherCollate(data.collate, known[0]))

    def _frozen_activations(self, *run: Any) -> FrozenActivations | None:
        """Cache none if completions are generated, which are others each time."""
        if self.on_policy is None:
            return super()._frozen_activations(*run)

        if self.train.cache_frozen == "on":
            text = "--cache-frozen on: cannot be combined with --on-policy. Leave it out."
            raise PackError(text, "conflict")
        return None

    @property
    def distillation(self) -> Distillation:
        train = self.train
        loss = train.loss
        if loss == "auto":
            loss = TASKS[train.task].losses[0]

        return Distillation(loss, train.jsd_beta, train.ce_weight)

    @property
    def _known(self) -> dict[str, Any]:
        """What is known of the teacher, for manifest and report."""
        if self.live is not None:
            known = {"teacher": self.live.name, "top_k": self.live.top_k}
            return known | {"on_policy": self.train.on_policy}

        return {"teacher": self.cache.facts.teacher, "top_k": self.cache.facts.top_k}

    def taught(self, batch: Batch) -> Batch:
        """Return a training batch as it is learned: of the student's own, or of the data."""
        if self.on_policy is not None and self.on_policy.takes(batch):
            batch = self.on_policy.generated(batch)
        return self.live.having(batch)

    def scorer_of(self, trainable: Trainable, head: Head | None) -> Scorer:
        if self.live is None:
            return StudentScorer(trainable.model, head, self.distillation)
        return StudentScorer(trainable.model, head, self.distillation, self.live.having)

    def objective_of(
        self, trainable: Trainable, head: Head | None, preparation: Preparation | None
    ) -> CausalLM:
        return DistillationObjective(
            self.distillation,
            trainable.model,
            head,
            preparation,
            self.scorer.score,
            validate=self._validation_score,
            taught=self.taught if self.live else None,
        )

    def summary(self, trained: Trained) -> Summary:
        summary = super().summary(trained)

        teacher = {
            **self._known,
            "loss": self.distillation.loss,
            "ce_weight": self.train.ce_weight,
        }

        return dataclasses.replace(
            summary,
            objective=summary.objective | {"task": "distill"} | teacher,
            report=summary.report | {"teacher": teacher},
        )
