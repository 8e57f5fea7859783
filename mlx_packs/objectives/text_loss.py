"""Losses of the numbers that are read at the last tokens of texts: rewards, scores and labels.

A loss takes the numbers of B examples and their labels, and gives the loss of each example, [B].

Rewards have TRL's numbers, Bradley and Terry's loss (https://arxiv.org/abs/2203.02155, equation 1)
and a term that centers them (https://arxiv.org/abs/2312.09244, section 2).

Rankings take scores and labels [B, D], label -1 where there is no document. RankNet:
https://doi.org/10.1145/1102351.1102363. ListNet: https://doi.org/10.1145/1273496.1273513. InfoNCE:
https://arxiv.org/abs/1807.03748

Labels have the losses of transformers' ``ForSequenceClassification``: the cross-entropy of one
label, the binary cross-entropies of several, and the squared error of a score. Labels on a scale
have the cross-entropy of a continuation-ratio model, which is the loss of CORN
(https://arxiv.org/abs/2111.08851) for each example.
"""

from collections.abc import Callable

import mlx.nn as nn
import numpy as np

from ..config.choices import RANKING_LOSSES, registered
from ..data.dataset import Batch, Layout
from ..data.labels import MULTI, REGRESSION
from ..runtime import mx
from .objective import Inputs, ScoredObjective, arrays_of
from .reader import Reader
from .score import Score

_HIDDEN = -1e9  # a logit that takes no part, finite so that its gradient is 0 and not NaN

Losses = Callable[[mx.array, mx.array], mx.array]


def reward_losses(rewards: mx.array, _: mx.array, centering: float = 0.0) -> mx.array:
    """Return the loss of each row, [B], of the rewards of what is chosen and rejected, [B, 2].

    Semantics: -log sigmoid(r_chosen - r_rejected) + centering * (r_chosen + r_rejected)^2.
    """
    losses = -nn.log_sigmoid(rewards[:, 0] - rewards[:, 1])
    if not centering:
        return losses
    return losses + centering * rewards.sum(axis=1).square()


def label_losses(logits: mx.array, labels: mx.array, problem: str) -> mx.array:
    """Return the loss of each example, [B] float32, of its logits [B, classes].

    Semantics: of one label, on a scale or not, int32 [B], -log softmax(logits)[label]; of several,
    bool [B, classes], the mean over classes of -log sigmoid(±logit); of a score, float32 [B],
    (logit - score)^2.
    """
    if problem == REGRESSION:
        return (logits[:, 0] - labels).square()
    if problem == MULTI:
        signs = mx.where(labels, 1.0, -1.0)
        return -nn.log_sigmoid(signs * logits).mean(axis=-1)
    return nn.losses.cross_entropy(logits, labels)


def infonce_loss(scores: mx.array, labels: mx.array) -> mx.array:
    """Each best document among all that are not.

    Semantics: mean over best p of -log(e^s_p / (e^s_p + sum of e^s_n over the others)).
    """
    best = labels == labels.max(axis=1, keepdims=True)
    others = (labels >= 0) & ~best
    rest = mx.logsumexp(mx.where(others, scores, _HIDDEN), axis=1, keepdims=True)

    losses = mx.logaddexp(scores, rest) - scores
    return mx.where(best, losses, 0).sum(axis=1) / best.sum(axis=1)


def listnet_loss(scores: mx.array, labels: mx.array) -> mx.array:
    """Semantics: -sum of softmax(labels) * log softmax(scores)."""
    is_document = labels >= 0
    shown = mx.where(is_document, scores, _HIDDEN)
    logs = shown - mx.logsumexp(shown, axis=1, keepdims=True)

    expected = mx.softmax(mx.where(is_document, labels, _HIDDEN), axis=1)
    return -mx.where(is_document, expected * logs, 0).sum(axis=1)


def pairwise_loss(
    scores: mx.array, labels: mx.array, of_difference: Callable[[mx.array], mx.array]
) -> mx.array:
    """Semantics: mean of of_difference(s_i - s_j) over the pairs with labels_i > labels_j."""
    ordered = (labels[:, :, None] > labels[:, None]) & (labels[:, None] >= 0)
    losses = of_difference(scores[:, :, None] - scores[:, None])

    count = mx.maximum(ordered.sum(axis=(1, 2)), 1)
    return mx.where(ordered, losses, 0).sum(axis=(1, 2)) / count


# Each takes scores, labels, and the margin that a difference should have.
_RANKINGS: dict[str, Callable[[mx.array, mx.array, float], mx.array]] = registered(
    RANKING_LOSSES,
    {
        "infonce": lambda scores, labels, _: infonce_loss(scores, labels),
        "listnet": lambda scores, labels, _: listnet_loss(scores, labels),
        "ranknet": lambda scores, labels, _: pairwise_loss(
            scores, labels, lambda difference: -nn.log_sigmoid(difference)
        ),
        "margin": lambda scores, labels, margin: pairwise_loss(
            scores, labels, lambda difference: mx.maximum(margin - difference, 0)
        ),
    },
)


def ranking_losses(scores: mx.array, labels: mx.array, loss: str, margin: float) -> mx.array:
    """Return the loss of each query, [B], by its name in `config.choices.RANKING_LOSSES`."""
    return _RANKINGS[loss](scores, labels, margin)


class TextLoss(ScoredObjective):
    """A loss of the numbers that a reader gives for the texts of examples.

    Args:
        reader: gives the numbers of texts, [M] or [M, K].
        losses: takes those of examples, [B, C] of C texts each or [B, K] of one, and their labels.
        unit: what targets are, as of `Objective`.
        score: scores batches; an objective that only trains needs none.
        class_weights: float [classes], weighs examples by their label.
    """

    def __init__(
        self,
        reader: Reader,
        losses: Losses,
        unit: str = "tokens",
        score: Callable[..., Score] | None = None,
        class_weights: np.ndarray | None = None,
    ) -> None:
        self.model = reader.model
        self.reader = reader
        self.unit = unit
        self._losses = losses
        self._score = score
        self._weights = None
        if class_weights is not None:
            self._weights = mx.array(class_weights.astype(np.float32))

    def loss(self, inputs: Inputs, layout: Layout = ()) -> tuple[mx.array, mx.array]:
        """Return the weighted sum of the losses of the examples, and the sum of the weights."""
        losses = self._losses(self.numbers(inputs), inputs["labels"])
        weights = inputs["weights"]
        if self._weights is not None:
            weights = weights * self._weights[inputs["labels"]]
        return mx.where(weights > 0, weights * losses, 0).sum(), weights.sum()

    def numbers(self, inputs: Inputs) -> mx.array:
        """Return the numbers of the texts of a batch, padding among them: [B, C] or [B, K]."""
        tokens = inputs["tokens"]
        last = self.reader.last(tokens.reshape(-1, tokens.shape[-1]), inputs["lengths"].flatten())
        return self.reader.of_last(last).reshape(len(tokens), -1)

    def outputs(self, batch: Batch) -> list[np.ndarray]:
        """Return the numbers of the examples of a batch, float64, their losses and their labels."""
        arrays = arrays_of(batch)
        numbers = self.numbers(arrays)
        count = len(batch.examples)
        losses = np.array(self._losses(numbers, arrays["labels"]), np.float64)[:count]
        values = np.array(numbers, np.float64)[:count]

        labels = batch.source.labels[list(batch.examples)]
        if labels.shape[1:] == batch.source.groups.shape[1:]:  # one for each text
            values = np.pad(values, [(0, 0), (0, labels.shape[1] - values.shape[1])])
        return [values, losses, labels]
