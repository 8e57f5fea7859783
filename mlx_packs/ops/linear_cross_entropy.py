"""Cross-entropy of a frozen language-model head, whose logits exist for a slice of the vocabulary.

One pass over the slices keeps a running maximum, sum and expected row of the head, as attention
does with keys and values (https://arxiv.org/abs/1805.02867). The gradient of the hidden states is
that expected row less the target's, so it is there with the loss: each slice of the head is
dequantized once and multiplied twice, and the backward pass recomputes nothing.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import mlx.core as mx

from .profile import profile

# The sum of a row's weights in float16: probabilities below 6e-8 would be zero, and in a large
# vocabulary they are a share that counts.
_FLOAT16_TOTAL = 1024.0
GATHERED_BYTES = 32 << 20  # of the rows of a head that `linear_logits` gathers at a time


class HeadSlice(NamedTuple):
    """Rows W [v, D] of a head."""

    logits: Callable[[mx.array], mx.array]  # h [n, D] to h @ W^T [n, v] (and its bias)
    back: Callable[[mx.array], mx.array]  # p [n, v] to p @ W [n, D]


class FrozenHead(NamedTuple):
    """A head of ``vocab_size`` rows of ``width``."""

    vocab_size: int
    width: int
    part: Callable[[int, int], HeadSlice]  # rows [start, stop)
    rows: Callable[[mx.array], mx.array]  # tokens [n] to W[tokens]
    bias: mx.array | None = None  # [V], which the logits of ``part`` have too


def cross_entropy(
    logits: mx.array, targets: mx.array, z_loss: float = 0.0, label_smoothing: float = 0.0
) -> mx.array:
    """Return the loss of each target from all logits; by default the negative log-likelihood.

    Semantics: as `linear_cross_entropy`, of logits [N, V] and targets [N]; [N], float32.
    """
    logits = logits.astype(mx.float32)
    picked = mx.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
    lse = _logsumexp(logits)[0]

    loss = lse - picked
    if z_loss:
        loss = loss + z_loss * lse.square()
    if label_smoothing:
        loss = loss + label_smoothing * (picked - logits.mean(axis=-1))
    return loss


@mx.custom_function
def _logsumexp(logits: mx.array) -> tuple[mx.array, mx.array]:
    largest = logits.max(axis=-1, keepdims=True)
    weights = profile().exp(logits - largest)
    total = weights.sum(axis=-1, keepdims=True)
    return (mx.log(total) + largest)[:, 0], weights * mx.reciprocal(total)


@_logsumexp.vjp
def _logsumexp_vjp(
    _: mx.array, cotangents: Sequence[mx.array], outputs: Sequence[mx.array]
) -> mx.array:
    return cotangents[0][:, None] * outputs[1]


def columns(rows: int, width: int) -> int:
    """Return how many columns of the logits of so many rows [., D] are computed at a time."""
    sizes = profile()
    fitting = min(sizes.logit_bytes // (4 * rows), sizes.slice_weights // width)
    return max(sizes.least_columns, fitting)


class _RunningSums(NamedTuple):
    """The state of N rows over the slices so far, all float32 but ``best``."""

    largest: mx.array  # [N, 1], maximum of the logits
    total: mx.array  # [N, 1], sum of exp(logit - largest)
    logit_sum: mx.array  # [N, 1]
    picked: mx.array  # [N], logit of the target
    best: mx.array  # [N], token of the largest logit
    expected: mx.array  # [N, D], sum of exp(logit - largest) * W
    row_sum: mx.array  # [1, D], sum of W

    def merged(self, other: "_RunningSums") -> "_RunningSums":
        """Return the state over the slices of both; of two largest logits the first is the best."""
        largest = mx.maximum(self.largest, other.largest)
        exp = profile().exp
        factor = exp(self.largest - largest)
        of_other = exp(other.largest - largest)

        better = (other.largest > self.largest)[:, 0]
        tied = (other.largest == self.largest)[:, 0]
        first = mx.where(tied, mx.minimum(self.best, other.best), self.best)

        return _RunningSums(
            largest,
            self.total * factor + other.total * of_other,
            self.logit_sum + other.logit_sum,
            self.picked + other.picked,
            mx.where(better, other.best, first),
            self.expected * factor + other.expected * of_other,
            self.row_sum + other.row_sum,
        )


def linear_cross_entropy(
    hidden: mx.array,
    targets: mx.array,
    head: FrozenHead,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    gradient: bool = True,
) -> tuple[mx.array, mx.array | None]:
    """Return the loss of each target under a frozen head and whether the head ranks it first.

    Semantics: logits = hidden @ W^T; lse = logsumexp(logits); nll = lse - logits[target];
    loss = nll + z_loss * lse^2 + label_smoothing * (logits[target] - mean(logits))

    Args:
        hidden: [N, D], any float dtype; products run in it, sums in float32.
        targets: [N], token ids.
        head: The frozen head.
        z_loss: Weight of lse^2 (PaLM, https://arxiv.org/abs/2204.02311).
        label_smoothing: Share of the target spread over all tokens.
        gradient: Whether the gradient of ``hidden`` will be asked for.

    Returns:
        Loss [N] float32, hit [N] bool (None with a gradient: training does not read it).
    """
    step = columns(hidden.shape[0], head.width)
    smooth = label_smoothing > 0

    def forward(h: mx.array) -> tuple[mx.array, ...]:
        by_stream: list[_RunningSums] = []
        for group in profile().rounds(range(0, head.vocab_size, step)):
            if by_stream:
                h = mx.depends(h, [array for seen in by_stream for array in seen])
            for number, (stream, start) in enumerate(group):
                with stream:
                    part = head.part(start, min(start + step, head.vocab_size))
                    sums = _of_slice(h, targets, part, start, gradient, smooth)
                    if number < len(by_stream):
                        by_stream[number] = by_stream[number].merged(sums)
                    else:
                        by_stream.append(sums)

        seen = functools.reduce(_RunningSums.merged, by_stream)
        lse = (mx.log(seen.total) + seen.largest)[:, 0]
        loss = lse - seen.picked
        if z_loss:
            loss = loss + z_loss * lse.square()
        if smooth:
            loss = loss + label_smoothing * (seen.picked - seen.logit_sum[:, 0] / head.vocab_size)
        if not gradient:
            return loss, seen.best == targets

        d_hidden = seen.expected * (mx.reciprocal(seen.total) * (1 + 2 * z_loss * lse[:, None]))
        d_hidden = d_hidden - (1 - label_smoothing) * head.rows(targets).astype(mx.float32)
        if smooth:
            d_hidden = d_hidden - label_smoothing / head.vocab_size * seen.row_sum

        # in float16 it is rounded once it is scaled with the loss, or small ones would be zero
        if h.dtype != mx.float16:
            d_hidden = d_hidden.astype(h.dtype)
        return loss, d_hidden

    if not gradient:
        return forward(hidden)

    loss_of = mx.custom_function(forward)

    @loss_of.vjp
    def loss_vjp(
        primal: mx.array, cotangents: Sequence[mx.array], outputs: Sequence[mx.array]
    ) -> mx.array:
        return (cotangents[0][:, None] * outputs[1]).astype(primal.dtype)

    return loss_of(hidden)[0], None


def linear_logits(hidden: mx.array, tokens: mx.array, head: FrozenHead) -> mx.array:
    """Return the logits of some tokens of each row, which are different ones in every row.

    Semantics: logits[n, k] = hidden[n] @ W[tokens[n, k]] (and its bias). They are rounded as
    `linear_cross_entropy` rounds the logits of its slices, so that both can be subtracted.

    The rows of W are gathered in float32, `GATHERED_BYTES` at a time or those of one row of
    ``hidden``, again for the gradient.

    Args:
        hidden: [N, D], any float dtype.
        tokens: [N, K], token ids.
        head: The frozen head.

    Returns:
        Logits [N, K] float32.
    """
    width = head.width
    count, chosen = tokens.shape
    step = max(1, GATHERED_BYTES // (4 * width * chosen))

    def gathered(start: int) -> mx.array:
        part = tokens[start : start + step]
        return head.rows(part.reshape(-1)).astype(mx.float32).reshape(*part.shape, width)

    def forward(h: mx.array) -> mx.array:
        parts: list[mx.array] = []
        for start in range(0, count, step):
            states = h[start : start + step].astype(mx.float32)
            if parts:  # one after the other, so that only one is in memory
                states = mx.depends(states, parts[-1:])
            parts.append((gathered(start) @ states[..., None])[..., 0])

        logits = mx.concatenate(parts).astype(h.dtype)
        if head.bias is not None:
            logits = logits + head.bias[tokens].astype(h.dtype)
        return logits.astype(mx.float32)

    logits_of = mx.custom_function(forward)

    @logits_of.vjp
    def logits_vjp(primal: mx.array, cotangent: mx.array, _: mx.array) -> mx.array:
        parts: list[mx.array] = []
        for start in range(0, count, step):
            part = cotangent[start : start + step]
            if parts:
                part = mx.depends(part, parts[-1:])
            parts.append((part[:, None] @ gathered(start))[:, 0])
        return mx.concatenate(parts).astype(primal.dtype)

    return logits_of(hidden)


def _of_slice(
    hidden: mx.array,
    targets: mx.array,
    part: HeadSlice,
    start: int,
    gradient: bool,
    smooth: bool,
) -> _RunningSums:
    """Return the state of one slice of the vocabulary, whose first token is ``start``."""
    logits = part.logits(hidden)
    width = logits.shape[1]
    inside = (targets >= start) & (targets < start + width)
    at = mx.clip(targets - start, 0, width - 1)
    weights, total, largest = _weights(logits, at)

    unused = mx.zeros((1,))
    expected = row_sum = logit_sum = best = unused
    if gradient:
        expected = part.back(weights.astype(hidden.dtype)).astype(mx.float32)
    else:
        best = mx.argmax(logits, axis=-1) + start
    if gradient and smooth:
        row_sum = part.back(mx.ones((1, width), hidden.dtype)).astype(mx.float32)
    if smooth:
        logit_sum = logits.astype(mx.float32).sum(axis=-1, keepdims=True)

    picked = mx.where(inside, _picked(logits, at), 0)
    return _RunningSums(largest, total, logit_sum, picked, best, expected, row_sum)


def _picked(logits: mx.array, at: mx.array) -> mx.array:
    return mx.take_along_axis(logits, at[:, None], axis=-1)[:, 0].astype(mx.float32)


def _weights(logits: mx.array, at: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Return exp(logit - reference) [n, v], their sum and the reference, [n, 1], in float32.

    The reference is the largest logit. Where MLX fuses the cross-entropy (of any targets ``at``),
    which reads the logits once, it is their logsumexp, and the sum is 1 (in float16 more).
    """
    device = profile()
    if not device.has_fused_kernels:
        logits = logits.astype(mx.float32)
        largest = logits.max(axis=-1, keepdims=True)
        weights = device.exp(logits - largest)
        return weights, weights.sum(axis=-1, keepdims=True), largest

    lse = (mx.fast.cross_entropy(logits, at) + _picked(logits, at))[:, None]
    total = mx.ones_like(lse)
    if logits.dtype == mx.float16:
        lse = lse - math.log(_FLOAT16_TOTAL)
        total = total * _FLOAT16_TOTAL
    return mx.exp(logits.astype(mx.float32) - lse), total, lse
