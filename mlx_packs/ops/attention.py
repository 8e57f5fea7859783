"""Attention in training: softmax(scale Q K^T + mask) V with grouped heads, K and V never repeated.

On a GPU this is MLX's own. On a CPU MLX composes it from operations whose softmax is most of the
time; here the softmax uses `exponential.exp` and the backward is written out, from the
probabilities that the forward made (as in https://arxiv.org/abs/2205.14135, section 3.1, untiled).
"""

from functools import cache

import mlx.core as mx

from .exponential import exp

Mask = mx.array | str | None


def _folded(x: mx.array, kv_heads: int) -> mx.array:
    """[B, H, T, D] to [B, KV, H / KV * T, D]: query heads of one KV head are more rows."""
    batch, heads, length, width = x.shape
    return x.reshape(batch, kv_heads, heads // kv_heads * length, width)


@cache
def _attention(scale: float, causal: bool, masked: bool):
    """Attention on CPUs as a function with its own gradient; one for each static shape of call."""

    @mx.custom_function
    def attend(queries, keys, values, mask):
        kv_heads, length, keys_length = keys.shape[1], queries.shape[2], keys.shape[2]
        folded = _folded(queries, kv_heads)
        scores = (folded * scale) @ keys.swapaxes(-1, -2)  # [B, KV, H / KV * T, S]
        shape = (*queries.shape[:3], keys_length)  # [B, H, T, S]
        if causal or masked:
            scores = _add_mask(scores.reshape(shape), causal, mask if masked else None)
            scores = scores.reshape(*folded.shape[:3], keys_length)
        weights = exp(scores - scores.max(axis=-1, keepdims=True))
        weights = weights * mx.reciprocal(weights.sum(axis=-1, keepdims=True))
        return (weights @ values).reshape(*queries.shape[:2], length, -1), weights

    @attend.vjp
    def attend_vjp(primals, cotangents, outputs):
        queries, keys, values, mask = primals
        kv_heads = keys.shape[1]
        output, weights = _folded(outputs[0], kv_heads), outputs[1]
        d_output = _folded(cotangents[0], kv_heads)
        d_values = weights.swapaxes(-1, -2) @ d_output
        d_weights = d_output @ values.swapaxes(-1, -2)
        shared = (d_output * output).sum(axis=-1, keepdims=True)
        d_scores = weights * (d_weights - shared)
        d_queries = (d_scores @ keys) * scale
        d_keys = d_scores.swapaxes(-1, -2) @ (_folded(queries, kv_heads) * scale)
        return d_queries.reshape(queries.shape), d_keys, d_values, mx.zeros_like(mask)

    return attend


def _add_mask(scores: mx.array, causal: bool, mask: mx.array | None) -> mx.array:
    """Scores [B, H, T, S] with what may not be seen at a large negative number."""
    lowest = mx.finfo(scores.dtype).min
    if causal:
        length, keys_length = scores.shape[-2:]
        rows = mx.arange(keys_length - length, keys_length)[:, None]
        scores = mx.where(rows >= mx.arange(keys_length)[None], scores, lowest)
    if mask is None:
        return scores
    return mx.where(mask, scores, lowest) if mask.dtype == mx.bool_ else scores + mask


def attention(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Mask = None
) -> mx.array:
    """Attention with grouped heads, and its gradient.

    Semantics: softmax(scale * queries @ keys^T + mask) @ values, each KV head serving H / KV heads

    Args:
        queries: [B, H, T, D].   keys, values: [B, KV, S, D] with KV dividing H.
        mask: ``"causal"``, boolean (True is seen) or additive, broadcastable to [B, H, T, S].
            No row may be fully masked.
    Returns: [B, H, T, D] in the dtype of queries. The mask gets no gradient.
    """
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    if not on_cpu or queries.dtype != mx.float32:
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)
    causal = isinstance(mask, str)
    masked = mask is not None and not causal
    given = mask if masked else mx.zeros((1,))
    return _attention(scale, causal, masked)(queries, keys, values, given)[0]
