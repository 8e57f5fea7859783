"""Classification: logits of labels by a head at the last token, or by the LM head on their names.

The losses are those of transformers' ``ForSequenceClassification``: the cross-entropy of one label,
the binary cross-entropies of several, and the squared error of a score. Labels on a scale have the
cross-entropy of a continuation-ratio model, which is the loss of CORN
(https://arxiv.org/abs/2111.08851) for each example.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import mlx.nn as nn
import numpy as np

from ..bases.tokenizer import padded
from ..data.dataset import Batch, Dataset, Layout, Tree
from ..data.labels import MULTI, ORDINAL, REGRESSION
from ..runtime import mx
from .causal_lm import Head, LossOptions, keep_prefixes, part_of, target_loss
from .objective import Inputs, Objective, arrays_of
from .reward_model import States, read_states
from .score import Score

_FORWARD = LossOptions(gradient=False)
_ROWS = 32  # names of labels that are computed in one pass
# What rounding does to log-probabilities of a label that is computed after a shared prompt.
_ROUNDING = {mx.float32: 1e-3, mx.float16: 5e-2, mx.bfloat16: 2e-1}


class Classifier(Protocol):
    """What gives the logits of classes."""

    model: nn.Module

    def outputs(self, batch: Batch) -> np.ndarray:
        """Return the logits of the examples of a batch, float64 [examples, classes]."""
        ...


Scoring = Callable[..., Score]  # of a `Classifier`, a dataset and what counts its batches


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


class _Labelled(Objective):
    """An objective on labelled examples; ``class_weights`` [classes] weigh them in the loss."""

    unit = "tokens"
    model: nn.Module

    def __init__(self, class_weights: np.ndarray | None, score: Scoring | None) -> None:
        self._weights = None
        if class_weights is not None:
            self._weights = mx.array(class_weights.astype(np.float32))
        self._score = score

    def _mean(self, losses: mx.array, inputs: Inputs) -> tuple[mx.array, mx.array]:
        """Return the weighted sum of the losses [M], and the sum of the weights."""
        weights = (inputs["owners"] >= 0).astype(mx.float32)
        if self._weights is not None:
            weights = weights * self._weights[inputs["labels"]]

        return mx.where(weights > 0, weights * losses, 0).sum(), weights.sum()

    def score(self, data: Dataset, advance: Callable[[], None] | None = None) -> Score:
        return self._score(self, data.once(), advance)

    def score_trained(self, batch: Batch) -> Score:
        return self._score(self, [batch])


class ScoreHead(_Labelled):
    """Logits by a linear head, [M, D] to [M, head rows], at the last token of each example.

    ``states`` makes the hidden states. ``score`` scores batches; an objective that only trains, or
    only classifies, needs none.
    """

    def __init__(
        self,
        model: nn.Module,
        states: States,
        head: nn.Module,
        problem: str,
        class_weights: np.ndarray | None = None,
        score: Scoring | None = None,
    ) -> None:
        super().__init__(class_weights, score)
        self.model = model
        self.states = states
        self.head = head
        self.problem = problem

    def loss(self, inputs: Inputs, layout: Layout = ()) -> tuple[mx.array, mx.array]:
        logits = self._logits(inputs, layout)
        return self._mean(label_losses(logits, inputs["labels"], self.problem), inputs)

    def outputs(self, batch: Batch) -> np.ndarray:
        logits = self._logits(arrays_of(batch), batch.layout)
        return np.array(logits, np.float64)[: len(batch.examples)]

    def _logits(self, inputs: Inputs, layout: Layout) -> mx.array:
        last = read_states(self.model, self.states, inputs, layout)
        logits = self.head(last).astype(mx.float32)

        if self.problem == ORDINAL:
            return scale_logits(logits)
        return logits


class LabelNames(_Labelled):
    """Log-probabilities of the names of labels, as completions of the prompt of each example.

    The loss is the cross-entropy of the tokens of the right name; the logit of a label is the
    log-probability of its whole name, so that a softmax over labels normalizes them. ``answers``
    are the tokens of each name.
    """

    def __init__(
        self,
        model: nn.Module,
        head: Head | None,
        answers: Sequence[np.ndarray],
        class_weights: np.ndarray | None = None,
        score: Scoring | None = None,
    ) -> None:
        super().__init__(class_weights, score)
        self.model = model
        self.head = head
        self.answers = answers
        self.shares_prompts: bool | None = None  # whether a prompt is computed once; tried first

    def loss(self, inputs: Inputs, layout: Layout = ()) -> tuple[mx.array, mx.array]:
        losses, _ = target_loss(self.model, self.head, inputs, layout)
        return self._mean(losses, inputs)

    def outputs(self, batch: Batch) -> np.ndarray:
        examples = [batch.source[i] for i in batch.examples]
        prompts = [e.tokens[: int(e.target.argmax())] for e in examples]

        if self.shares_prompts is None:
            self.shares_prompts = self._shares(prompts[0])

        log_probs = self._in_rows
        if self.shares_prompts:
            log_probs = self._after_prompt
        return np.array([log_probs(prompt, self.answers) for prompt in prompts], np.float64)

    def _shares(self, prompt: np.ndarray) -> bool:
        """Try whether a model computes a prompt once for two names as exactly as for each."""
        two = self.answers[:2]
        expected = self._in_rows(prompt, two)

        try:
            actual = self._after_prompt(prompt, two)
        except (TypeError, ValueError, AttributeError, IndexError, KeyError, RuntimeError):
            return False

        dtype = self.model(mx.array(prompt[None, :1])).dtype
        return bool(np.abs(actual - expected).max() <= _ROUNDING[dtype])

    def _after_prompt(self, prompt: np.ndarray, answers: Sequence[np.ndarray]) -> np.ndarray:
        """Compute all of the prompt but its last token once."""
        if len(prompt) < 2:
            return self._in_rows(prompt, answers)

        prefix = mx.array(prompt[None, :-1])
        part = part_of(self.model, self.head)
        kept = keep_prefixes(self.model, part, prefix)
        shared = {"prefix": prefix, "kept": kept}
        return self._log_probs(shared, prompt[-1:], answers)

    def _in_rows(self, prompt: np.ndarray, answers: Sequence[np.ndarray]) -> np.ndarray:
        return self._log_probs({}, prompt, answers)

    def _log_probs(
        self, shared: Inputs, before: np.ndarray, answers: Sequence[np.ndarray]
    ) -> np.ndarray:
        """Return the log-probability of each answer after ``shared`` and ``before``, [answers].

        Answers of like length are computed together.
        """
        by_length = np.argsort([len(answer) for answer in answers], kind="stable")
        result = np.zeros(len(answers))
        for chosen in np.array_split(by_length, -(-len(answers) // _ROWS)):
            result[chosen] = self._sums(shared, before, [answers[i] for i in chosen])

        return result

    def _sums(
        self, shared: Inputs, before: np.ndarray, answers: Sequence[np.ndarray]
    ) -> np.ndarray:
        """As `_log_probs`, of answers in one pass, each in a row."""
        offset = 0
        layout: Layout = ()
        if shared:
            offset = shared["prefix"].shape[1]  # whose states come first
            layout = Tree(1, offset)

        rows = padded([np.concatenate([before, answer[:-1]]) for answer in answers])
        first = offset + len(before) - 1
        width = rows.shape[1]
        positions = [first + i * width + np.arange(len(a)) for i, a in enumerate(answers)]
        inputs = {
            **shared,
            "tokens": mx.array(rows),
            "positions": mx.array(np.concatenate(positions)),
            "targets": mx.array(np.concatenate(answers)),
        }

        losses, _ = target_loss(self.model, self.head, inputs, layout, _FORWARD)
        ends = np.cumsum([len(answer) for answer in answers])[:-1]
        return np.array([-part.sum() for part in np.split(np.array(losses, np.float64), ends)])
