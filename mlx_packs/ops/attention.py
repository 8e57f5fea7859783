"""Attention in training: softmax(scale Q K^T + mask) V with grouped heads, K and V never repeated.

With CUDA, and on Metal where MLX has a fused gradient (`has_fused_gradient`), forward and backward
are MLX's. Otherwise scores exist for one block at a time (`attention_blocks`).
"""

import functools
import io
import math
from collections.abc import Callable

import mlx.core as mx

from .attention_blocks import Arrays, BlockAttention, Mask, Seen
from .profile import profile
from .watchdog import AttentionSizes, attention_calls, watched_chip


def attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: Mask = None,
    segments: mx.array | None = None,
) -> mx.array:
    """Return attention with grouped heads; it has a gradient of its own.

    Semantics: softmax(scale * queries @ keys^T + mask) @ values, each KV head serving H / KV heads

    Args:
        queries: [B, H, T, D].
        keys: [B, KV, S, D] with KV dividing H.
        values: [B, KV, S, D].
        scale: Of the scores.
        mask: ``"causal"``, boolean (True is seen) or additive, broadcastable to [B, H, T, S].
            No row may be fully masked.
        segments: [B, T], with T = S, numbers that never fall along T: a query sees keys of its own
            segment only. Together with ``mask="causal"`` only.

    Returns:
        [B, H, T, D] in the dtype of queries. The mask gets no gradient.
    """
    device = profile()
    seen = Seen(mask, segments)
    fewer = queries.shape[2] < keys.shape[2]
    fused = segments is None and has_fused_gradient(queries.dtype, queries.shape[-1], mask, fewer)
    if fused or (device.has_fused_kernels and mx.cuda.is_available()):
        return mlx_attention(queries, keys, values, scale, seen.full_mask())

    by_blocks = device.attention or BlockAttention
    return by_blocks.of(device, scale, seen, queries, keys)(queries, keys, values)


def mlx_attention(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Mask
) -> mx.array:
    """Return MLX's own attention, in several calls where one would keep a display waiting."""
    chip = watched_chip()
    rows = heads = 1
    if chip is not None and not isinstance(mask, mx.array):
        count, all_heads, length, width = queries.shape
        square = math.isqrt(length * (2 * keys.shape[2] - length))  # length with as many scores
        sizes = AttentionSizes(count, all_heads, keys.shape[1], square, width)
        rows, heads = attention_calls(sizes, chip)

    def attend(*arrays: mx.array) -> mx.array:
        return mx.fast.scaled_dot_product_attention(*arrays, scale=scale, mask=mask)

    def by_heads(*arrays: mx.array) -> mx.array:
        return _in_parts(attend, arrays, heads, axis=1)

    return _in_parts(by_heads, (queries, keys, values), rows, axis=0)


def _in_parts(function: Callable[..., mx.array], arrays: Arrays, count: int, axis: int) -> mx.array:
    """Return the joined results for parts of arrays along an axis; a short array is used again."""
    if count == 1:
        return function(*arrays)

    parts = []
    for array in arrays:
        own = mx.split(array, min(count, array.shape[axis]), axis)
        parts.append([part for part in own for _ in range(count // len(own))])

    return mx.concatenate([function(*part) for part in zip(*parts, strict=True)], axis)


def has_fused_gradient(dtype: mx.Dtype, width: int, mask: Mask, fewer: bool = False) -> bool:
    """Return whether MLX's own attention keeps no scores for its gradient on this device.

    ``fewer`` is whether there are fewer queries than keys.
    """
    if not profile().has_fused_kernels or isinstance(mask, mx.array):
        return False
    return _has_fused_gradient(dtype, width, mask, fewer)


@functools.cache
def _has_fused_gradient(dtype: mx.Dtype, width: int, mask: str | None, fewer: bool = False) -> bool:
    """Return whether MLX's gradient is one primitive: its graph is laid out, and not computed."""
    x = mx.zeros((1, 1, 2, width), dtype)
    keys = x
    if fewer:
        keys = mx.zeros((1, 1, 4, width), dtype)

    def attend(q: mx.array, k: mx.array, v: mx.array) -> list[mx.array]:
        return [mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0, mask=mask)]

    _, gradients = mx.vjp(attend, [x, keys, keys], [x])
    graph = io.StringIO()
    mx.export_to_dot(graph, *gradients)
    return "ScaledDotProductAttentionVJP" in graph.getvalue()
