"""The next token as a teacher predicts it, by a cache or by the teacher alongside the student."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..adapters.trainable import Trainable
from ..config.choices import ANSWER_METRICS, TASKS
from ..config.recipe import Recipe
from ..data.dataset import Batch, Dataset
from ..data.encoding import Examples
from ..data.rows import Splits
from ..data.sampler import Draw
from ..data.teacher_cache import TeacherCache, TeacherTargets, tokenizer_key
from ..display import Display
from ..errors import PackError
from ..evaluation.perplexity import Scorer
from ..evaluation.teacher import VALIDATED, StudentScorer
from ..objectives.causal_lm import CausalLM, Head, Preparation
from ..objectives.distillation import Distillation, DistillationObjective
from ..objectives.frozen_activations import FrozenActivations
from ..packs.base import Base
from .causal_lm import CausalLMTask
from .live_teacher import LiveTeacher, OnPolicy, TeacherCollate
from .phases import PhaseData, RunPhase
from .task import Summary, Trained
from .teacher import with_cached_teacher


class DistillTask(CausalLMTask):
    """``--task distill``: as ``lm``, with another loss."""

    validated = (*VALIDATED, *(f"valid_{metric}" for metric in ANSWER_METRICS))

    shares_prefixes = False

    cache: TeacherCache | None = None
    live: LiveTeacher | None = None  # in the place of a cache
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

    def _loaded(self, student: Base) -> LiveTeacher:
        train = self.train
        with self.display.working("teacher", f"loading {train.teacher}"):
            teacher = LiveTeacher.load(train.teacher, train.teacher_top_k, student)

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
            text = "--cache-frozen on: does not go with --on-policy. Leave it out."
            raise PackError(text, "conflict")
        return None

    @property
    def distillation(self) -> Distillation:
        train = self.train
        loss = train.loss
        if loss == "auto":
            loss = TASKS[train.task].losses[0]

        temperature = self._known["temperature"]
        return Distillation(loss, train.jsd_beta, train.ce_weight, temperature)

    @property
    def _known(self) -> dict[str, Any]:
        """What is known of the teacher, for manifest and report."""
        if self.live is not None:
            teacher = self.live
            return {
                "teacher": teacher.name,
                "top_k": teacher.top_k,
                "temperature": teacher.temperature,
                "on_policy": self.train.on_policy,
            }

        facts = self.cache.facts
        return {
            "teacher": facts.teacher,
            "top_k": facts.top_k,
            "temperature": facts.temperature,
        }

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
