"""Classification: logits of labels by a head at the last token.

The losses are those of transformers' ``ForSequenceClassification``: the cross-entropy of one label,
the binary cross-entropies of several, and the squared error of a score. Labels on a scale have the
cross-entropy of a continuation-ratio model, which is the loss of CORN
(https://arxiv.org/abs/2111.08851) for each example.
"""

from collections.abc import Callable

import mlx.nn as nn
import numpy as np

from ..data.dataset import Batch, Layout
from ..data.labels import MULTI, ORDINAL, REGRESSION
from ..runtime import mx
from .objective import Inputs, ScoredObjective, arrays_of
from .reader import Reader, head_reader
from .score import Score


def label_losses(logits: mx.array, labels: mx.array, problem: str) -> mx.array:
    """Return the loss of each example, [M] float32, of its logits [M, classes].

    Semantics: of one label, on a scale or not, int32 [M], -log softmax(logits)[label]; of several,
    bool [M, classes], the mean over classes of -log sigmoid(±logit); of a score, float32 [M],
    (logit - score)^2.
    """
    if problem == REGRESSION:
        return (logits[:, 0] - labels).square()
    if problem == MULTI:
        signs = mx.where(labels, 1.0, -1.0)
        return -nn.log_sigmoid(signs * logits).mean(axis=-1)
    return nn.losses.cross_entropy(logits, labels)


def scale_logits(steps: mx.array) -> mx.array:
    """Return log-probabilities [M, K] of K labels on a scale, float32 [M, K - 1] to float32.

    Semantics: sigmoid(steps[k]) is the probability that the label is above k if it is not below, so
    log p(y = k) = sum over j < k of log sigmoid(steps[j]), and but for the highest label log(1 -
    sigmoid(steps[k])). Probabilities of "above k" cannot rise with k, whatever the head learns.
    """
    above = mx.cumsum(nn.log_sigmoid(steps), axis=-1)
    reached = mx.pad(above, [(0, 0), (1, 0)])
    stays = mx.pad(nn.log_sigmoid(-steps), [(0, 0), (0, 1)])
    return reached + stays


def label_reader(model: nn.Module, head: nn.Module, name: str, problem: str) -> Reader:
    """Return what reads the logits of labels by a head; ``name`` is the base's."""
    if problem == ORDINAL:
        return head_reader(model, head, name, "classify", scale_logits)
    return head_reader(model, head, name, "classify")


class ScoreHead(ScoredObjective):
    """Logits by a head at the last token of each example.

    ``class_weights`` [classes] weigh the examples in the loss. ``score`` scores batches; an
    objective that only trains, or only classifies, needs none.
    """

    unit = "tokens"

    def __init__(
        self,
        reader: Reader,
        problem: str,
        class_weights: np.ndarray | None = None,
        score: Callable[..., Score] | None = None,
    ) -> None:
        self.model = reader.model
        self.reader = reader
        self.problem = problem
        self._weights = None
        if class_weights is not None:
            self._weights = mx.array(class_weights.astype(np.float32))
        self._score = score

    def loss(self, inputs: Inputs, layout: Layout = ()) -> tuple[mx.array, mx.array]:
        """Return the weighted sum of the losses of the examples, and the sum of the weights."""
        logits = self.reader(inputs, layout)
        losses = label_losses(logits, inputs["labels"], self.problem)
        weights = (inputs["owners"] >= 0).astype(mx.float32)
        if self._weights is not None:
            weights = weights * self._weights[inputs["labels"]]

        return mx.where(weights > 0, weights * losses, 0).sum(), weights.sum()

    def outputs(self, batch: Batch) -> np.ndarray:
        """Return the logits of the examples of a batch, float64 [examples, classes]."""
        logits = self.reader(arrays_of(batch), batch.layout)
        return np.array(logits, np.float64)[: len(batch.examples)]
