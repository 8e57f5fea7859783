"""Reward modelling: the score of a completion, and the loss of pairs of them, with TRL's numbers.

The loss is that of Bradley and Terry: https://arxiv.org/abs/2203.02155, equation 1. The term that
centers the rewards: https://arxiv.org/abs/2312.09244, section 2.
"""

from collections.abc import Callable

import mlx.nn as nn

from ..adapters.trainable import compiled
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


class HeadReader:
    """A linear head, [M, D] to [M, rows], on the states of a model; errors are of `hidden_states`.

    ``name`` is the base's.
    """

    def __init__(self, model: nn.Module, head: nn.Module, name: str, task: str = "reward") -> None:
        self.model = model
        self.head = head
        self.states = hidden_states(model, name, task)

    def __call__(self, inputs: Inputs, layout: Layout = ()) -> mx.array:
        """Return what the head gives for the state of each target of a batch, [M, rows] float32."""
        segments = segments_of(inputs, layout)
        prefixes = prefixes_in(inputs)
        hidden = forward(self.model, self.states, inputs["tokens"], segments, prefixes=prefixes)
        last = hidden.reshape(-1, hidden.shape[-1])[inputs["positions"]]
        return self.head(last).astype(mx.float32)


def completion_scores(
    reader: HeadReader, rows: int, inputs: Inputs, layout: Layout = ()
) -> mx.array:
    """Return the score of the last token of each completion, [rows, 2] float32; 0 for padding.

    ``inputs`` and ``layout`` are those of a batch of tokens (data/preferences.py) with two
    completions in each row.
    """
    scores = reader(inputs, layout)[:, 0]
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
    """The loss of rewards, read by a head of one row, on batches of pairs.

    ``score`` scores batches; an objective that only trains needs none.
    """

    unit = "tokens"

    def __init__(
        self,
        reader: HeadReader,
        centering: float = 0.0,
        score: Callable[..., Score] | None = None,
    ) -> None:
        self.model = reader.model
        self.reader = reader
        self.centering = centering
        self._score = score

        def outcome(inputs: Inputs, layout: Layout) -> tuple[mx.array, mx.array]:
            """Losses [P] and rewards [P, 2] of all rows, padding among them."""
            rewards, _ = self._rewards(inputs, layout)
            return reward_losses(rewards, self.centering), rewards

        self.outcome = compiled(self.model, outcome)

    def loss(self, inputs: Inputs, layout: Layout = ()) -> tuple[mx.array, mx.array]:
        rewards, is_row = self._rewards(inputs, layout)
        losses = reward_losses(rewards, self.centering)
        return mx.where(is_row, losses, 0).sum(), is_row.astype(mx.float32).sum()

    def _rewards(self, inputs: Inputs, layout: Layout) -> tuple[mx.array, mx.array]:
        """Return the rewards [P, 2], and which rows are no padding [P]."""
        rows = len(inputs["labels"])
        rewards = completion_scores(self.reader, rows, inputs, layout)
        is_row = (inputs["owners"][None] == 2 * mx.arange(rows)[:, None]).any(axis=1)
        return rewards, is_row
