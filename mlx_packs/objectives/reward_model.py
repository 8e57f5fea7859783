"""Reward modelling: the score of a completion, and the loss of pairs of them, with TRL's numbers.

The loss is that of Bradley and Terry: https://arxiv.org/abs/2203.02155, equation 1. The term that
centers the rewards: https://arxiv.org/abs/2312.09244, section 2.
"""

from collections.abc import Callable, Sequence

import mlx.nn as nn

from ..adapters.trainable import trainable_modules
from ..data.preference_batches import PreferenceBatch, shared_rows, split_rows
from ..errors import PackError
from ..runtime import mx
from .causal_lm import Arrays, as_arrays, forward, split_head
from .objective import Objective
from .score import Score

States = Callable[..., mx.array]  # tokens [B, T] to final hidden states [B, T, D]


def hidden_states(model: nn.Module, name: str) -> States:
    """Return the part of a model that computes the states that a head reads.

    Raises:
        PackError: the model changes its logits after the head, so that this part is not certain.
    """
    head = split_head(model)
    if head is None:
        raise PackError(
            f"--task reward: {name} scales or caps its logits, or names its parts in its own way, so "
            "what a head would read is not known. Train another base.",
            "unsupported",
            "task",
        )
    return head.hidden


def completion_scores(
    model: nn.Module, states: States, score: nn.Module, rows: int, arrays: Arrays
) -> mx.array:
    """Return the score of the last token of each completion, [rows, 2] float32; 0 for padding.

    Args:
        model: the model.
        states: its hidden states.
        score: maps [M, D] to [M, 1].
        rows: number of rows, of two completions each.
        arrays: tokens, positions of the last tokens, owners and, of packed ones, segments. An owner
            [M] is the number of the completion, -1 where it is padding.
    """
    tokens, positions, owners, *segments = arrays
    hidden = forward(model, states, tokens, *segments)
    scores = score(hidden.reshape(-1, hidden.shape[-1])[positions])[:, 0].astype(mx.float32)
    # sums in a fixed order, which a scatter on a GPU does not have
    owned = owners[None] == mx.arange(2 * rows)[:, None]
    return mx.where(owned, scores[None], 0).sum(axis=1).reshape(-1, 2)


def reward_losses(rewards: mx.array, centering: float) -> mx.array:
    """Return the loss of each row, [P], of the rewards of what is chosen and rejected, [P, 2].

    Semantics: -log sigmoid(r_chosen - r_rejected) + centering * (r_chosen + r_rejected)^2.
    """
    losses = -nn.log_sigmoid(rewards[:, 0] - rewards[:, 1])
    return losses + centering * rewards.sum(axis=1).square() if centering else losses


class RewardModel(Objective):
    """The loss of rewards on batches of pairs.

    Args:
        model: the model.
        states: its hidden states.
        score: the head, [M, D] to [M, 1].
        centering: ``center_rewards_coefficient``.
        score_batches: scores batches; an objective that only trains needs none.
    """

    unit = "tokens"

    def __init__(
        self,
        model: nn.Module,
        states: States,
        score: nn.Module,
        centering: float = 0.0,
        score_batches: Callable[..., Score] | None = None,
    ) -> None:
        self.model, self.states, self.head, self.centering = model, states, score, centering
        self._score = score_batches

        def outcome(*arrays: mx.array) -> tuple[mx.array, mx.array]:
            """Losses [P] and rewards [P, 2] of all rows, padding among them."""
            rewards, _ = self._rewards(*arrays)
            return reward_losses(rewards, self.centering), rewards

        self.outcome = mx.compile(outcome, inputs=[m.state for m in trainable_modules(model)])

    def arrays(self, batch: PreferenceBatch) -> Arrays:
        """Return the arrays of a batch that `loss` takes."""
        tokens, positions, _, _, *segments = as_arrays(batch.tokens)
        owners, slots = mx.array(batch.tokens.owners), mx.zeros((len(batch.labels),))
        return (tokens, positions, owners, slots, *segments)

    def loss(self, *arrays: mx.array) -> tuple[mx.array, mx.array]:
        """Return the sum of the losses of the rows, and how many rows there are."""
        rewards, is_row = self._rewards(*arrays)
        losses = reward_losses(rewards, self.centering)
        return mx.where(is_row, losses, 0).sum(), is_row.astype(mx.float32).sum()

    def _rewards(
        self,
        tokens: mx.array,
        positions: mx.array,
        owners: mx.array,
        slots: mx.array,
        *segments: mx.array,
    ) -> tuple[mx.array, mx.array]:
        """Return the rewards [P, 2], and which rows are no padding [P]."""
        arrays = tokens, positions, owners, *segments
        rewards = completion_scores(self.model, self.states, self.head, len(slots), arrays)
        is_row = (owners[None] == 2 * mx.arange(len(slots))[:, None]).any(axis=1)
        return rewards, is_row

    def split(self, batch: PreferenceBatch, parts: int) -> Sequence[PreferenceBatch]:
        """Return the rows of a batch in pieces."""
        return split_rows(batch, parts)

    def share(self, batch: PreferenceBatch, rank: int, size: int) -> PreferenceBatch:
        """Return the rows of a batch that a rank takes."""
        return shared_rows(batch, size)[rank]

    def score(
        self, batches: Sequence[PreferenceBatch], advance: Callable[[], None] | None = None
    ) -> Score:
        """Loss, accuracy and margin of the rewards on batches."""
        return self._score(self, batches, advance)
