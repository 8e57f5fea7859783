"""Loss, accuracy and margin of a model on held-out preferences."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..config.choices import TASKS
from ..data.dataset import Batch
from ..distributed.group import group
from ..errors import PackError
from ..objectives.objective import arrays_of
from ..objectives.preference import PreferenceObjective
from ..objectives.score import Score
from ..runtime import mx
from .perplexity import perplexity


@dataclass(frozen=True)
class PairScore(Score):
    """What every score of preferences has.

    Attributes:
        nll: mean loss of a row.
        accuracy: share of the rows whose chosen completion has the higher reward, or whose rated
            completion has a reward of the right sign; a tie counts as half.
        margin: mean reward of chosen completions less that of rejected ones.
        rows: number of rows.
    """

    nll: float
    accuracy: float
    margin: float
    rows: int
    numbers: ClassVar = ("valid_loss", "valid_preference_accuracy", "valid_reward_margin")

    @property
    def value(self) -> float:
        return self.nll

    @property
    def entries(self) -> dict[str, float]:
        return dict(zip(self.numbers, (self.nll, self.accuracy, self.margin), strict=True))

    @property
    def text(self) -> str:
        return f"loss {self.nll:.3f}, accuracy {self.accuracy:.1%}, margin {self.margin:.3f}"


@dataclass(frozen=True)
class PreferenceScore(PairScore):
    """The score of a model on preferences; ``ppl`` is the perplexity of chosen completions."""

    ppl: float = float("nan")
    ppl_se: float | None = None  # not known


def score_preferences(
    objective: PreferenceObjective,
    batches: Sequence[Batch],
    advance: Callable[[], None] | None = None,
) -> PreferenceScore:
    """Score all rows of some batches, at least one, in evaluation mode."""
    if not batches:
        raise PackError("--data: there are no examples to evaluate.", "data")
    objective.model.eval()

    def scored(batch: Batch) -> list[np.ndarray]:
        prepared = objective.prepare(batch)
        total, *values = objective.outcome(arrays_of(prepared), prepared.layout)
        mx.eval(total, values)
        if advance is not None:
            advance()
        rows = batch.denominator
        return [np.array(total), *(np.array(value, np.float64)[:rows] for value in values)]

    losses, *parts = zip(*group().map(scored, batches), strict=True)
    loss = sum(float(each) for each in losses)
    rewards, log_probs, targets = map(np.concatenate, parts)

    labels = [batch.inputs["labels"][: batch.denominator] for batch in batches]
    desirable = np.concatenate(labels) > 0
    rated = TASKS[objective.train.task].rated
    if rated:
        gains = np.where(desirable, 1, -1) * rewards[:, 0]
    else:
        gains = rewards[:, 0] - rewards[:, 1]
    accuracy = float(((np.sign(gains) + 1) / 2).mean())

    margin = float(gains.mean())
    if rated and desirable.any() and not desirable.all():  # each kind counts as much as the other
        margin = float(rewards[desirable, 0].mean() - rewards[~desirable, 0].mean())

    nll = -log_probs[desirable, 0].sum()
    count = int(targets[desirable, 0].sum())
    ppl = perplexity(float(nll), count) if count else float("nan")

    return PreferenceScore(loss / len(rewards), accuracy, margin, len(rewards), ppl)
