"""Loss, accuracy and margin of a reward model on held-out pairs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..data.preference_batches import PreferenceBatch
from ..errors import PackError
from ..objectives.reward_model import RewardModel
from ..runtime import mx


@dataclass(frozen=True)
class RewardScore:
    """The score of a reward model on pairs.

    Attributes:
        nll: mean loss of a pair.
        accuracy: share of the pairs whose chosen completion has the higher reward; a tie counts as
            half.
        margin: mean reward of chosen completions less that of rejected ones.
        rows: number of pairs.
        ppl: none; a score is no probability.
    """

    nll: float
    accuracy: float
    margin: float
    rows: int
    ppl: None = None

    def log_entry(self) -> dict[str, float]:
        """Entries of the line in a run's metrics for validation examples."""
        return {
            "valid_loss": self.nll,
            "valid_preference_accuracy": self.accuracy,
            "valid_reward_margin": self.margin,
        }

    def summary(self) -> str:
        """Return the same in one line for people."""
        return f"loss {self.nll:.3f}, accuracy {self.accuracy:.1%}, margin {self.margin:.3f}"


def score_pairs(
    objective: RewardModel,
    batches: Sequence[PreferenceBatch],
    advance: Callable[[], None] | None = None,
) -> RewardScore:
    """Score all pairs of some batches, at least one, in evaluation mode."""
    if not batches:
        raise PackError("--data: there are no examples to evaluate.", "data")
    objective.model.eval()
    losses, rewards = [], []
    for batch in batches:
        values = objective.outcome(*objective.arrays(batch))
        mx.eval(values)
        for parts, value in zip((losses, rewards), values, strict=True):
            parts.append(np.array(value, np.float64)[: batch.terms])
        if advance is not None:
            advance()
    pairs = np.concatenate(rewards)
    gains = pairs[:, 0] - pairs[:, 1]
    accuracy = float(((np.sign(gains) + 1) / 2).mean())
    loss = float(np.concatenate(losses).mean())
    return RewardScore(loss, accuracy, float(gains.mean()), len(pairs))
