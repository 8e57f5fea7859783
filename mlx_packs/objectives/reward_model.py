"""Reward modelling: the score of a completion, and the loss of pairs of them, with TRL's numbers.

The loss is that of Bradley and Terry: https://arxiv.org/abs/2203.02155, equation 1. The term that
centers the rewards: https://arxiv.org/abs/2312.09244, section 2.
"""

from collections.abc import Callable

import mlx.nn as nn

from ..adapters.trainable import compiled
from ..data.dataset import Layout
from ..runtime import mx
from .objective import Inputs, ScoredObjective
from .reader import Reader
from .score import Score


def reward_losses(rewards: mx.array, centering: float) -> mx.array:
    """Return the loss of each row, [P], of the rewards of what is chosen and rejected, [P, 2].

    Semantics: -log sigmoid(r_chosen - r_rejected) + centering * (r_chosen + r_rejected)^2.
    """
    losses = -nn.log_sigmoid(rewards[:, 0] - rewards[:, 1])
    if not centering:
        return losses
    return losses + centering * rewards.sum(axis=1).square()


class RewardModel(ScoredObjective):
    """The loss of rewards, read by a head of one row, on batches of pairs.

    ``score`` scores batches; an objective that only trains needs none.
    """

    unit = "tokens"

    def __init__(
        self,
        reader: Reader,
        centering: float = 0.0,
        score: Callable[..., Score] | None = None,
    ) -> None:
        self.model = reader.model
        self.centering = centering
        self._reader = reader
        self._score = score
        self.outcome = compiled(self.model, self._outcome)

    def loss(self, inputs: Inputs, layout: Layout = ()) -> tuple[mx.array, mx.array]:
        losses, _ = self._outcome(inputs, layout)
        firsts = 2 * mx.arange(len(losses))
        is_row = (inputs["owners"][None] == firsts[:, None]).any(axis=1)
        return mx.where(is_row, losses, 0).sum(), is_row.astype(mx.float32).sum()

    def _outcome(self, inputs: Inputs, layout: Layout) -> tuple[mx.array, mx.array]:
        """Return the losses [P] and the rewards [P, 2] of all rows, padding among them."""
        scores = self._reader(inputs, layout)[:, 0]
        completions = mx.arange(2 * len(inputs["labels"]))

        # sums in a fixed order, which a scatter on a GPU does not have
        owned = inputs["owners"][None] == completions[:, None]
        rewards = mx.where(owned, scores[None], 0).sum(axis=1).reshape(-1, 2)
        return reward_losses(rewards, self.centering), rewards
