"""Cross-entropy of a language-model head, on the rows that have a target and never all at once.

The logits of a chunk of rows are made, reduced and dropped; the backward makes them again. Memory
is one chunk of logits instead of [rows, vocabulary].
"""

from collections.abc import Callable

import mlx.core as mx

from .exponential import exp

CHUNK_BYTES = 64 * 2**20


def cross_entropy(logits: mx.array, targets: mx.array) -> mx.array:
    """Negative log-likelihood of each target, in float32.

    Semantics: nll[n] = logsumexp(logits[n]) - logits[n, targets[n]]

    Args:
        logits: [N, V], any float dtype.   targets: [N], token ids.
    Returns: [N], float32.
    """
    logits = logits.astype(mx.float32)
    picked = mx.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
    return _logsumexp(logits)[0] - picked


@mx.custom_function
def _logsumexp(logits: mx.array) -> tuple[mx.array, mx.array]:
    largest = logits.max(axis=-1, keepdims=True)
    weights = exp(logits - largest)
    total = weights.sum(axis=-1, keepdims=True)
    return (mx.log(total) + largest)[:, 0], weights * mx.reciprocal(total)


@_logsumexp.vjp
def _logsumexp_vjp(_, cotangents, outputs):
    return cotangents[0][:, None] * outputs[1]


def linear_cross_entropy(
    hidden: mx.array,
    targets: mx.array,
    head: Callable[[mx.array], mx.array],
    vocab_size: int,
) -> tuple[mx.array, mx.array]:
    """Negative log-likelihood of each target and whether the head ranks it first.

    Semantics: logits = head(hidden); nll = cross_entropy(logits); hit = argmax(logits) == target

    Args:
        hidden: [N, D], any float dtype.   targets: [N], token ids.
        head: frozen map from [n, D] to logits [n, V].   vocab_size: V, which sets the chunk.
    Returns: nll [N] float32, hit [N] bool.
    """
    rows = max(32, CHUNK_BYTES // (4 * vocab_size))

    def chunk(h: mx.array, t: mx.array) -> tuple[mx.array, mx.array]:
        logits = head(h)
        return cross_entropy(logits, t), mx.argmax(logits, axis=-1) == t

    if hidden.shape[0] <= rows:
        return chunk(hidden, targets)

    def recomputed(h: mx.array, t: mx.array) -> tuple[mx.array, mx.array]:
        # targets are closed over: mx.checkpoint wants a gradient for every argument
        return mx.checkpoint(lambda states: chunk(states, t))(h)

    starts = range(0, hidden.shape[0], rows)
    parts = [recomputed(hidden[i : i + rows], targets[i : i + rows]) for i in starts]
    return mx.concatenate([p[0] for p in parts]), mx.concatenate([p[1] for p in parts])
