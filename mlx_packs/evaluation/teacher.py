"""Held-out perplexity of a student, and its divergence from a teacher with a cache."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.nn as nn

from ..data.dataset import Batch, Layout
from ..objectives.causal_lm import Head
from ..objectives.distillation import Distillation, target_losses
from ..objectives.objective import Inputs
from ..runtime import mx
from .perplexity import VALIDATED as OF_PERPLEXITY
from .perplexity import PerplexityScore, Scorer

VALIDATED = (*OF_PERPLEXITY, "valid_teacher_loss")


@dataclass(frozen=True)
class StudentScore(PerplexityScore):
    """Its value is the loss of the training, a target.

    Attributes:
        divergence: from the teacher, in nats a target.
        ce_weight: share of the cross-entropy in the loss.
    """

    divergence: float = 0.0
    ce_weight: float = 0.0

    @property
    def value(self) -> float:
        return (1 - self.ce_weight) * self.divergence + self.ce_weight * self.nll

    @property
    def entries(self) -> dict[str, float]:
        values = (self.value, self.ppl, self.accuracy, self.divergence)
        return dict(zip(VALIDATED, values, strict=True))

    @property
    def reported(self) -> dict[str, float | None]:
        return {**super().reported, "teacher_loss": self.divergence}


class StudentScorer(Scorer):
    """Scores batches with the arrays of a `TeacherCache`, which ``prepare`` may add."""

    def __init__(
        self,
        model: nn.Module,
        head: Head | None,
        distillation: Distillation,
        prepare: Callable[[Batch], Batch] = lambda batch: batch,
    ) -> None:
        super().__init__(model, head, prepare)
        self.distillation = distillation

    def values(
        self, head: Head | None, inputs: Inputs, layout: Layout
    ) -> tuple[mx.array | None, ...]:
        losses = target_losses(self.model, head, inputs, layout, self.distillation, gradient=False)
        return losses.nll, losses.hits, losses.divergence

    def score(
        self, batches: Sequence[Batch], advance: Callable[[], None] | None = None
    ) -> StudentScore:
        examples = self.examples(batches, advance)
        score = examples.score
        divergence = float(examples.more.sum()) / score.targets
        return StudentScore(
            **vars(score), divergence=divergence, ce_weight=self.distillation.ce_weight
        )
