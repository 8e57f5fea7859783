"""Attention in training: softmax(scale Q K^T + mask) V with grouped heads, K and V never repeated.

Scores exist for one block of queries at a time, forward and backward: the backward makes each block
again from Q, K and V instead of keeping T x S probabilities (https://arxiv.org/abs/2205.14135,
section 3.1); only where one block is all, on a CPU, it is kept. A block leaves out keys that none
of its queries sees. On a GPU the forward is MLX's fused kernel, whose own backward would store all
scores; with CUDA both are MLX's.
"""

from collections.abc import Iterator
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from .exponential import exp
from .sliced_matmul import device

Mask = mx.array | str | None

SCORE_BYTES = {"cpu": 2 << 20, "gpu": 64 << 20}  # of one block of scores
_LEAST_QUERIES = 32


def attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: Mask = None,
    segments: mx.array | None = None,
) -> mx.array:
    """Attention with grouped heads, and its gradient.

    Semantics: softmax(scale * queries @ keys^T + mask) @ values, each KV head serving H / KV heads

    Args:
        queries: [B, H, T, D].   keys, values: [B, KV, S, D] with KV dividing H.
        mask: ``"causal"``, boolean (True is seen) or additive, broadcastable to [B, H, T, S].
            No row may be fully masked.
        segments: [B, T], with T = S, numbers that never fall along T: a query sees keys of its own
            segment only. Together with ``mask="causal"`` only.
    Returns: [B, H, T, D] in the dtype of queries. The mask gets no gradient.
    """
    on_cpu = device() == "cpu"
    seen = _Seen(mask, segments)
    if not on_cpu and mx.cuda.is_available():
        return mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask=seen.whole()
        )
    batch, heads, length, _ = queries.shape
    room = SCORE_BYTES[device()]
    fitting = room // (4 * batch * heads * keys.shape[2]) // _LEAST_QUERIES * _LEAST_QUERIES
    blocks = list(seen.blocks(length, keys.shape[2], max(_LEAST_QUERIES, fitting)))
    return _attention(scale, seen, blocks, on_cpu)(queries, keys, values)[0]


class _Block(NamedTuple):
    """Queries [start, stop) and the keys [first, last) that any of them sees."""

    start: int
    stop: int
    first: int
    last: int


class _Seen(NamedTuple):
    """Which keys a query sees."""

    mask: Mask
    segments: mx.array | None

    def whole(self) -> Mask:
        """As one mask."""
        if self.segments is None:
            return self.mask
        length = self.segments.shape[1]
        return self.block(_Block(0, length, 0, length), 0)

    def blocks(self, length: int, keys_length: int, rows: int) -> Iterator[_Block]:
        """Blocks of so many queries, in order."""
        causal = isinstance(self.mask, str)
        firsts = None if self.segments is None else _first_keys(self.segments)
        for start in range(0, length, rows):
            stop = min(start + rows, length)
            last = stop + keys_length - length if causal else keys_length
            yield _Block(start, stop, int(firsts[start]) if firsts is not None else 0, last)

    def block(self, at: _Block, offset: int) -> mx.array | None:
        """The mask of a block, broadcastable to [B, H, queries, keys]; query t stands at key
        t + offset."""
        if self.mask is None:
            return None
        if not isinstance(self.mask, str):
            rows = slice(at.start, at.stop) if self.mask.shape[-2] > 1 else slice(None)
            columns = slice(at.first, at.last) if self.mask.shape[-1] > 1 else slice(None)
            return self.mask[..., rows, columns]
        queries = mx.arange(at.start + offset, at.stop + offset)[:, None]
        seen = queries >= mx.arange(at.first, at.last)[None]
        if self.segments is not None:
            own = self.segments[:, at.start : at.stop, None]
            seen = seen & (own == self.segments[:, None, at.first : at.last])
            seen = seen[:, None]
        return seen


def _first_keys(segments: mx.array) -> np.ndarray | None:
    """First key [T] that a query at t sees in any row; None while a step is being compiled."""
    try:
        numbers = np.array(segments)
    except ValueError:  # a traced array has no values
        return None
    starts = np.diff(numbers, axis=1, prepend=numbers[:, :1] - 1) != 0
    firsts = np.maximum.accumulate(np.where(starts, np.arange(numbers.shape[1]), 0), axis=1)
    return firsts.min(axis=0)


def _folded(x: mx.array, kv_heads: int) -> mx.array:
    """[B, H, T, D] to [B, KV, H / KV * T, D]: query heads of one KV head are more rows."""
    batch, heads, length, width = x.shape
    return x.reshape(batch, kv_heads, heads // kv_heads * length, width)


def _probabilities(
    queries: mx.array, keys: mx.array, scale: float, mask: mx.array | None
) -> mx.array:
    """Softmax of a block's scores, [B, KV, H / KV * n, keys] in the dtype of queries."""
    batch, heads, n, _ = queries.shape
    scores = (_folded(queries, keys.shape[1]) * scale) @ keys.swapaxes(-1, -2)
    dtype, shape = scores.dtype, scores.shape
    scores = scores.astype(mx.float32)
    if mask is not None:
        scores = scores.reshape(batch, heads, n, -1)
        if mask.dtype == mx.bool_:
            scores = mx.where(mask, scores, mx.finfo(mx.float32).min)
        else:
            scores = scores + mask
        scores = scores.reshape(shape)
    weights = exp(scores - scores.max(axis=-1, keepdims=True))
    return (weights * mx.reciprocal(weights.sum(axis=-1, keepdims=True))).astype(dtype)


def _attention(scale: float, seen: _Seen, blocks: list[_Block], on_cpu: bool):
    """Attention over these blocks as a function with its own gradient.

    MLX computes what is independent side by side; each block is made to wait for the one before.
    Returns: a function to (output, probabilities if they are one block on a CPU).
    """

    def of_block(at: _Block, queries, keys):
        offset = keys.shape[2] - queries.shape[2]
        part = queries[:, :, at.start : at.stop]
        return _probabilities(part, keys[:, :, at.first : at.last], scale, seen.block(at, offset))

    @mx.custom_function
    def attend(queries, keys, values):
        if not on_cpu:
            fused = mx.fast.scaled_dot_product_attention
            return (fused(queries, keys, values, scale=scale, mask=seen.whole()),)
        outputs = []
        for at in blocks:
            if outputs:
                queries = mx.depends(queries, outputs[-1])
            weights = of_block(at, queries, keys)
            output = weights @ values[:, :, at.first : at.last]
            outputs.append(output.reshape(*queries.shape[:2], at.stop - at.start, -1))
        if len(blocks) == 1:
            return outputs[0], weights
        return (mx.concatenate(outputs, axis=2),)

    @attend.vjp
    def attend_vjp(primals, cotangents, outputs):
        queries, keys, values = primals
        cotangent, kv_heads = cotangents[0], keys.shape[1]
        d_queries, d_keys, d_values = [], None, None
        for at in blocks:
            if d_queries:
                queries = mx.depends(queries, d_queries[-1])
            visible = slice(at.first, at.last)
            weights = outputs[1] if len(outputs) > 1 else of_block(at, queries, keys)
            d_output = _folded(cotangent[:, :, at.start : at.stop], kv_heads)
            d_weights = d_output @ values[:, :, visible].swapaxes(-1, -2)
            shared = (weights * d_weights).sum(axis=-1, keepdims=True)
            d_scores = weights * (d_weights - shared) * scale
            own = _folded(queries[:, :, at.start : at.stop], kv_heads)
            d_keys = _added(d_keys, d_scores.swapaxes(-1, -2) @ own, visible, keys)
            d_values = _added(d_values, weights.swapaxes(-1, -2) @ d_output, visible, values)
            part = d_scores @ keys[:, :, visible]
            part = part.reshape(*queries.shape[:2], at.stop - at.start, -1)
            if len(blocks) > 1:
                part = mx.depends(part, [d_keys, d_values])
            d_queries.append(part)
        whole = d_queries[0] if len(blocks) == 1 else mx.concatenate(d_queries, axis=2)
        return whole, d_keys, d_values

    return attend


def _added(total: mx.array | None, part: mx.array, at: slice, like: mx.array) -> mx.array:
    """``total`` with ``part`` added at these keys; None is zero."""
    if part.shape == like.shape:
        return part if total is None else total + part
    total = mx.zeros_like(like) if total is None else total
    total[:, :, at] = total[:, :, at] + part
    return total
