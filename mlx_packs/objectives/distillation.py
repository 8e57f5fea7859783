"""The divergence from a teacher whose most likely tokens are cached, and the cross-entropy.

The teacher's probabilities of its K most likely tokens are known, and what all others have
together. These others count as one token, as with TRL's ``loss_add_tail``: both distributions are
compared on K + 1 outcomes. The K probabilities alone, scaled up to a sum of 1, would be those of a
teacher that is too certain (https://arxiv.org/abs/2503.16870). Merging outcomes never raises a
divergence (data processing), so it is at most that of the whole vocabulary.

Divergences are as in generalized knowledge distillation (https://arxiv.org/abs/2306.13649).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.nn as nn

from ..data.dataset import Batch, Layout
from ..ops.linear_cross_entropy import cross_entropy, linear_cross_entropy, linear_logits
from ..runtime import mx
from .causal_lm import CausalLM, Head, target_states
from .objective import Inputs

_LEAST_REST = 1e-6  # probability of the other tokens of a student: below it is rounding
_LEAST_LOG = -30.0  # of the other tokens of a teacher, which may have none
# From this share of the vocabulary on, all logits take less than gathered rows of the head.
_FEW_TOKENS = 1 / 8


class TargetLosses(NamedTuple):
    """The losses [M] float32 of targets."""

    nll: mx.array
    divergence: mx.array  # of the student from the teacher
    hits: mx.array | None  # whether the target ranks first; None with a gradient


@dataclass(frozen=True)
class Distillation:
    """What the loss of a target is: (1 - ce_weight) * divergence + ce_weight * nll.

    Attributes:
        loss: ``forward-kl`` is KL(teacher, student), ``reverse-kl`` KL(student, teacher), and
            ``jsd`` the generalized Jensen-Shannon divergence, beta * KL(teacher, m) + (1 - beta) *
            KL(student, m) with m = beta * teacher + (1 - beta) * student.
        jsd_beta: beta, in (0, 1).
        ce_weight: share of the cross-entropy, in [0, 1].
    """

    loss: str
    jsd_beta: float = 0.5
    ce_weight: float = 0.0

    def mixed(self, losses: TargetLosses) -> mx.array:
        """Return the loss [M] of every target."""
        if not self.ce_weight:  # so that it is not computed
            return losses.divergence
        return (1 - self.ce_weight) * losses.divergence + self.ce_weight * losses.nll

    def divergence(self, student: mx.array, teacher: mx.array) -> mx.array:
        """Return the divergence [M] of log-probabilities [M, K] of the same outcomes."""
        if self.loss == "forward-kl":
            return _kl(teacher, student)
        if self.loss == "reverse-kl":
            return _kl(student, teacher)

        beta = self.jsd_beta
        mixture = mx.logaddexp(student + math.log1p(-beta), teacher + math.log(beta))
        return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


def _kl(p: mx.array, q: mx.array) -> mx.array:
    return (mx.exp(p) * (p - q)).sum(axis=-1)


def target_losses(
    model: nn.Module,
    head: Head | None,
    inputs: Inputs,
    layout: Layout,
    distillation: Distillation,
    gradient: bool = True,
) -> TargetLosses:
    """Return the losses of the targets of a batch with the arrays of a `TeacherCache`.

    By a frozen head logits exist for a slice of the vocabulary, and for the teacher's tokens. Other
    heads and many teacher tokens need all logits [M, V].
    """
    states = target_states(model, head, inputs, layout)
    tokens = inputs["teacher_tokens"]
    frozen = head.frozen if head is not None else None
    if frozen is not None and tokens.shape[1] > _FEW_TOKENS * frozen.vocab_size:
        frozen = None

    if frozen is None:
        logits = states if head is None else head.logits(states)
        nll, hits, student = _of_logits(logits.astype(mx.float32), inputs)
        vocab_size = logits.shape[-1]
    else:
        targets = inputs["targets"]
        vocab_size = frozen.vocab_size

        nll, hits = linear_cross_entropy(states, targets, frozen, gradient=gradient)
        chosen = mx.concatenate([tokens, targets[:, None]], axis=1)
        logits = linear_logits(states, chosen, frozen)
        student = logits[:, :-1] - logits[:, -1:] - nll[:, None]

    teacher = inputs["teacher_logprobs"]
    if tokens.shape[1] < vocab_size:
        rest = mx.maximum(inputs["teacher_rest"], _LEAST_LOG)
        teacher = mx.concatenate([teacher, rest[:, None]], axis=1)
        known = mx.logsumexp(student, axis=-1, keepdims=True)
        others = mx.log(-mx.expm1(mx.minimum(known, -_LEAST_REST)))
        student = mx.concatenate([student, others], axis=1)

    return TargetLosses(nll, distillation.divergence(student, teacher), hits)


def _of_logits(logits: mx.array, inputs: Inputs) -> tuple[mx.array, mx.array, mx.array]:
    """Return nll [M], hits [M] and the log-probabilities [M, K] of the teacher's tokens."""
    targets = inputs["targets"]
    nll = cross_entropy(logits, targets)
    hits = mx.argmax(logits, axis=-1) == targets

    lse = mx.logsumexp(logits, axis=-1, keepdims=True)
    return nll, hits, mx.take_along_axis(logits, inputs["teacher_tokens"], axis=-1) - lse


class DistillationObjective(CausalLM):
    """The next token of each input as a teacher predicts it.

    ``taught`` adds the arrays of a teacher to a batch that does not come with them.
    """

    def __init__(
        self,
        distillation: Distillation,
        *causal_lm: Any,
        taught: Callable[[Batch], Batch] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(*causal_lm, **settings)
        self.distillation = distillation
        self._taught = taught

    def prepare(self, batch: Batch) -> Batch:
        if self._taught is not None:
            batch = self._taught(batch)
        return super().prepare(batch)

    def loss(self, inputs: Inputs, layout: Layout = ()) -> tuple[mx.array, mx.array]:
        losses = target_losses(self.model, self.head, inputs, layout, self.distillation)
        is_target = (inputs["owners"] >= 0).astype(mx.float32)
        return (self.distillation.mixed(losses) * is_target).sum(), is_target.sum()
