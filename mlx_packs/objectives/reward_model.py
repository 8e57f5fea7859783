"""Reward modelling: the score of a completion, and the loss of pairs of them, with TRL's numbers.

The loss is that of Bradley and Terry: https://arxiv.org/abs/2203.02155, equation 1. The term that
centers the rewards: https://arxiv.org/abs/2312.09244, section 2.
"""

from collections.abc import Callable

import mlx.nn as nn

from ..adapters.trainable import trainable_modules
from ..data.dataset import Layout
from ..errors import PackError
from ..runtime import mx
from .causal_lm import forward, prefixes_in, segments_of, split_head
from .objective import Inputs, ScoredObjective
from .score import Score

States = Callable[..., mx.array]  # tokens [B, T] to final hidden states [B, T, D]


def hidden_states(model: nn.Module, name: str, task: str = "reward") -> States:
    """Return the part of a model that computes the states that a head reads.

    Raises a PackError if the model changes its logits after the head: this part is not certain.
    """
    head = split_head(model)
    if head is None:
        raise PackError(
            f"--task {task}: {name} scales or caps its logits, or names its parts in its own way, "
            "so what a head would read is not known. Train another base.",
            "unsupported",
            "task",
        )
    return head.hidden


def read_states(model: nn.Module, states: States, inputs: Inputs, layout: Layout) -> mx.array:
    """Return the state that each target of a batch is predicted from, [M, D]."""
    segments = segments_of(inputs, layout)
    hidden = forward(model, states, inputs["tokens"], segments, prefixes=prefixes_in(inputs))
    return hidden.reshape(-1, hidden.shape[-1])[inputs["positions"]]


def completion_scores(
    model: nn.Module,
    states: States,
    score: nn.Module,
    rows: int,
    inputs: Inputs,
    layout: Layout = (),
) -> mx.array:
    """Return the score of the last token of each completion, [rows, 2] float32; 0 for padding.

    ``states`` makes the hidden states, ``score`` maps [M, D] to [M, 1]. ``inputs`` and ``layout``
    are those of a batch of tokens (data/preferences.py) with two completions in each row.
    """
    last = read_states(model, states, inputs, layout)
    scores = score(last)[:, 0].astype(mx.float32)
    # sums in a fixed order, which a scatter on a GPU does not have
    owned = inputs["owners"][None] == mx.arange(2 * rows)[:, None]
    return mx.where(owned, scores[None], 0).sum(axis=1).reshape(-1, 2)


def reward_losses(rewards: mx.array, centering: float) -> mx.array:
    """Return the loss of each row, [P], of the rewards of what is chosen and rejected, [P, 2].

    Semantics: -log sigmoid(r_chosen - r_rejected) + centering * (r_chosen + r_rejected)^2.
    """
    losses = -nn.log_sigmoid(rewards[:, 0] - rewards[:, 1])
    if not centering:
        return losses
    return losses + centering * rewards.sum(axis=1).square()


class RewardModel(ScoredObjective):
    """The loss of rewards on batches of pairs.

    ``states`` makes hidden states, ``score`` is the head, [M, D] to [M, 1]. ``score_batches``
    scores batches; an objective that only trains needs none.
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
        self.model = model
        self.states = states
        self.head = score
        self.centering = centering
        self._score = score_batches

        def outcome(inputs: Inputs, layout: Layout) -> tuple[mx.array, mx.array]:
            """Losses [P] and rewards [P, 2] of all rows, padding among them."""
            rewards, _ = self._rewards(inputs, layout)
            return reward_losses(rewards, self.centering), rewards

        self.outcome = mx.compile(outcome, inputs=[m.state for m in trainable_modules(model)])

    def loss(self, inputs: Inputs, layout: Layout = ()) -> tuple[mx.array, mx.array]:
        rewards, is_row = self._rewards(inputs, layout)
        losses = reward_losses(rewards, self.centering)
        return mx.where(is_row, losses, 0).sum(), is_row.astype(mx.float32).sum()

    def _rewards(self, inputs: Inputs, layout: Layout) -> tuple[mx.array, mx.array]:
        """Return the rewards [P, 2], and which rows are no padding [P]."""
        rows = len(inputs["labels"])
        rewards = completion_scores(self.model, self.states, self.head, rows, inputs, layout)
        is_row = (inputs["owners"][None] == 2 * mx.arange(rows)[:, None]).any(axis=1)
        return rewards, is_row
