"""Cross-entropy of a frozen language-model head, whose logits exist for a slice of the vocabulary.

One pass over the slices keeps a running maximum, sum and expected row of the head, as attention
does with keys and values (https://arxiv.org/abs/1805.02867). The gradient of the hidden states is
that expected row less the target's, so it is there with the loss: each slice of the head is
unpacked once and multiplied twice, and nothing is made again in the backward.
"""

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx

from .exponential import exp
from .sliced_matmul import SLICE_WEIGHTS, device

LOGIT_BYTES = {"cpu": 1 << 20, "gpu": 64 << 20}  # of one slice of logits
_LEAST_COLUMNS = 256


class HeadSlice(NamedTuple):
    """Rows W [v, D] of a head. ``logits``: h [n, D] to h @ W^T [n, v] (and its bias).
    ``back``: p [n, v] to p @ W [n, D].
    """

    logits: Callable[[mx.array], mx.array]
    back: Callable[[mx.array], mx.array]


class FrozenHead(NamedTuple):
    """A head of V rows of D. ``part``: rows [start, stop).   ``rows``: tokens [n] to W[tokens]."""

    vocab_size: int
    width: int
    part: Callable[[int, int], HeadSlice]
    rows: Callable[[mx.array], mx.array]


def cross_entropy(
    logits: mx.array, targets: mx.array, z_loss: float = 0.0, label_smoothing: float = 0.0
) -> mx.array:
    """Loss of each target from whole logits, in float32; by default its negative log-likelihood.

    Semantics: as `linear_cross_entropy`.

    Args:
        logits: [N, V], any float dtype.   targets: [N], token ids.
    Returns: [N], float32.
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
    weights = exp(logits - largest)
    total = weights.sum(axis=-1, keepdims=True)
    return (mx.log(total) + largest)[:, 0], weights * mx.reciprocal(total)


@_logsumexp.vjp
def _logsumexp_vjp(_, cotangents, outputs):
    return cotangents[0][:, None] * outputs[1]


def columns(rows: int, width: int) -> int:
    """Columns of the logits that are made at a time for so many rows of hidden states [., D]."""
    room, weights = LOGIT_BYTES[device()], SLICE_WEIGHTS[device()]
    fitting = min(room // (4 * rows), weights // width)
    return max(_LEAST_COLUMNS, fitting)


class _Running(NamedTuple):
    """What the slices so far have told of N rows, all float32 but ``best``.

    largest, total, sum_of: [N, 1], maximum, sum of exp(logit - largest), sum of the logits.
    picked: [N], logit of the target.   best: [N], token of the largest logit.
    expected: [N, D], sum of exp(logit - largest) * W.   mean_row: [1, D], sum of W.
    """

    largest: mx.array
    total: mx.array
    sum_of: mx.array
    picked: mx.array
    best: mx.array
    expected: mx.array
    mean_row: mx.array


def linear_cross_entropy(
    hidden: mx.array,
    targets: mx.array,
    head: FrozenHead,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    gradient: bool = True,
) -> tuple[mx.array, mx.array]:
    """Loss of each target under a frozen head and whether the head ranks it first.

    Semantics: logits = hidden @ W^T; lse = logsumexp(logits); nll = lse - logits[target];
    loss = nll + z_loss * lse^2 + label_smoothing * (logits[target] - mean(logits))

    Args:
        hidden: [N, D], any float dtype; products run in it, sums in float32.
        targets: [N], token ids.
        z_loss: weight of lse^2 (PaLM, https://arxiv.org/abs/2204.02311).
        label_smoothing: share of the target spread over all tokens.
        gradient: whether the gradient of ``hidden`` will be asked for.
    Returns: loss [N] float32, hit [N] bool.
    """
    step = columns(hidden.shape[0], head.width)
    smooth = label_smoothing > 0

    def forward(h):
        seen = None
        for start in range(0, head.vocab_size, step):
            stop = min(start + step, head.vocab_size)
            if seen is not None:
                h = mx.depends(h, list(seen))
            seen = _with_slice(seen, h, targets, head.part(start, stop), start, gradient, smooth)
        lse = (mx.log(seen.total) + seen.largest)[:, 0]
        loss = lse - seen.picked
        if z_loss:
            loss = loss + z_loss * lse.square()
        if smooth:
            loss = loss + label_smoothing * (seen.picked - seen.sum_of[:, 0] / head.vocab_size)
        hit = seen.best == targets
        if not gradient:
            return loss, hit
        d_hidden = seen.expected * (mx.reciprocal(seen.total) * (1 + 2 * z_loss * lse[:, None]))
        d_hidden = d_hidden - (1 - label_smoothing) * head.rows(targets).astype(mx.float32)
        if smooth:
            d_hidden = d_hidden - label_smoothing / head.vocab_size * seen.mean_row
        return loss, hit, d_hidden.astype(h.dtype)

    if not gradient:
        return forward(hidden)

    @mx.custom_function
    def loss_of(h):
        return forward(h)

    @loss_of.vjp
    def loss_vjp(_, cotangents, outputs):
        return (cotangents[0][:, None] * outputs[2]).astype(outputs[2].dtype)

    return tuple(loss_of(hidden)[:2])


def _with_slice(
    seen: _Running | None,
    hidden: mx.array,
    targets: mx.array,
    part: HeadSlice,
    start: int,
    gradient: bool,
    smooth: bool,
) -> _Running:
    """The running sums with one more slice of the vocabulary, whose first token is ``start``."""
    logits = part.logits(hidden).astype(mx.float32)
    width = logits.shape[1]
    own = logits.max(axis=-1, keepdims=True)
    largest = own if seen is None else mx.maximum(seen.largest, own)
    weights = exp(logits - largest)
    total = weights.sum(axis=-1, keepdims=True)
    inside = (targets >= start) & (targets < start + width)
    at = mx.clip(targets - start, 0, width - 1)[:, None]
    picked = mx.where(inside, mx.take_along_axis(logits, at, axis=-1)[:, 0], 0)
    best = mx.argmax(logits, axis=-1) + start
    nothing = mx.zeros((1,))
    sum_of = logits.sum(axis=-1, keepdims=True) if smooth else nothing
    expected = part.back(weights.astype(hidden.dtype)).astype(mx.float32) if gradient else nothing
    ones = mx.ones((1, width), hidden.dtype)
    mean_row = part.back(ones).astype(mx.float32) if smooth and gradient else nothing
    if seen is None:
        return _Running(largest, total, sum_of, picked, best, expected, mean_row)
    shrink = exp(seen.largest - largest)
    return _Running(
        largest,
        seen.total * shrink + total,
        seen.sum_of + sum_of,
        seen.picked + picked,
        mx.where((own > seen.largest)[:, 0], best, seen.best),
        seen.expected * shrink + expected if gradient else nothing,
        seen.mean_row + mean_row,
    )
