"""Attention in training: softmax(scale Q K^T + mask) V with grouped heads, K and V never repeated.

With CUDA, and on Metal where MLX has a fused gradient (`has_fused_gradient`), forward and backward
are MLX's. Otherwise scores exist for one block of queries and keys at a time, never T x S of them:
the backward computes those of each block again (https://arxiv.org/abs/2205.14135). Keys that no
query of a block sees are left out. `BlockAttention` is what a GPU computes.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import mlx.core as mx
import numpy as np

from .profile import Profile, gradient_has, profile
from .watchdog import attention_calls, is_watched

Mask = mx.array | str | None
Arrays = Sequence[mx.array]


class Block(NamedTuple):
    """Queries [start, stop) and the keys [first, last) that any of them sees."""

    start: int
    stop: int
    first: int
    last: int


class Seen(NamedTuple):
    """The keys that a query sees."""

    mask: Mask
    segments: mx.array | None

    @property
    def same_for_all_heads(self) -> bool:
        """Whether no head has a mask of its own."""
        return not isinstance(self.mask, mx.array) or self.mask.ndim < 3 or self.mask.shape[-3] == 1

    def full_mask(self) -> Mask:
        """Return the mask of all queries and keys."""
        if self.segments is None:
            return self.mask
        length = self.segments.shape[1]
        return self.block(Block(0, length, 0, length), 0)

    def blocks(self, length: int, keys_length: int, rows: int, width: int) -> list[list[Block]]:
        """Return blocks of some queries and keys at most, in a list for the same queries."""
        firsts = _first_keys(self.segments) if self.segments is not None else None

        blocks = []
        for start in range(0, length, rows):
            stop = min(start + rows, length)
            first = int(firsts[start]) if firsts is not None else 0
            last = stop + keys_length - length if isinstance(self.mask, str) else keys_length

            cuts = [first, *range((first // width + 1) * width, last, width), last]
            blocks.append([Block(start, stop, *keys) for keys in itertools.pairwise(cuts)])
        return blocks

    def block(self, at: Block, offset: int) -> mx.array | None:
        """Return the mask of a block for [B, H, queries, keys]; query t is at key t + offset."""
        if self.mask is None:
            return None

        if not isinstance(self.mask, str):
            rows = columns = slice(None)  # a mask of one row, or column, is the same for all
            if self.mask.shape[-2] > 1:
                rows = slice(at.start, at.stop)
            if self.mask.shape[-1] > 1:
                columns = slice(at.first, at.last)
            return self.mask[..., rows, columns]

        if self.segments is None and at.last <= at.start + offset + 1:
            return None

        queries = mx.arange(at.start + offset, at.stop + offset)[:, None]
        seen = queries >= mx.arange(at.first, at.last)[None]
        if self.segments is not None:
            own = self.segments[:, at.start : at.stop, None]
            seen = seen & (own == self.segments[:, None, at.first : at.last])
            seen = seen[:, None]
        return seen


def _first_keys(segments: mx.array) -> np.ndarray | None:
    """Return the first key [T] that a query at t sees in any row; None in a compiled step."""
    try:
        numbers = np.array(segments)
    except ValueError:  # a traced array has no values
        return None

    starts = np.diff(numbers, axis=1, prepend=numbers[:, :1] - 1) != 0
    firsts = np.maximum.accumulate(np.where(starts, np.arange(numbers.shape[1]), 0), axis=1)
    return firsts.min(axis=0)


class PerHead(NamedTuple):
    """The arrays [B, heads, T, ...] that one stream reads."""

    queries: mx.array
    keys: mx.array
    values: mx.array
    d_output: mx.array | None = None  # in the backward pass the gradient of its output
    shared: mx.array | None = None  # in the backward pass its sum of output * gradient


@dataclass(frozen=True)
class BlockAttention:
    """Attention over blocks of all keys, by MLX's forward; each waits for the one before."""

    device: Profile
    scale: float
    seen: Seen
    blocks: list[list[Block]]
    width: int  # the most keys of a block
    parts: int  # of the heads, whose blocks are computed at once

    unit: ClassVar[float] = 1.0  # by which scores are multiplied

    @classmethod
    def of(
        cls, device: Profile, scale: float, seen: Seen, queries: mx.array, keys: mx.array
    ) -> "BlockAttention":
        """Return attention of arrays [B, H, T, D] and [B, KV, S, D], cut for a device."""
        batch, heads, length, _ = queries.shape
        keys_length = keys.shape[2]
        parts = 1
        if keys.shape[1] % device.streams == 0 and seen.same_for_all_heads:
            parts = device.streams

        rows, width = device.score_block(4 * batch * heads // parts, length, keys_length)
        blocks = seen.blocks(length, keys_length, rows, width)
        return cls(device, scale, seen, blocks, width, parts)

    @property
    def only(self) -> bool:
        """Whether there is only one block."""
        return len(self.blocks) == 1 and len(self.blocks[0]) == 1

    def __call__(self, queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
        """Return the output [B, H, T, D]."""

        @mx.custom_function
        def attend(queries: mx.array, keys: mx.array, values: mx.array) -> tuple[mx.array, ...]:
            return self.forward(queries, keys, values)

        @attend.vjp
        def attend_vjp(primals: Arrays, cotangents: Arrays, outputs: Arrays) -> Arrays:
            return self._backward(primals, cotangents[0], outputs)

        return attend(queries, keys, values)[0].transpose(0, 2, 1, 3)

    def forward(self, queries: mx.array, keys: mx.array, values: mx.array) -> Sequence[mx.array]:
        """Return the output [B, T, H, D], as the next projection keeps it, and what it saves."""
        outputs = []
        for (at,) in self.blocks:
            visible = slice(at.first, at.last)
            output = mx.fast.scaled_dot_product_attention(
                queries[:, :, at.start : at.stop],
                keys[:, :, visible],
                values[:, :, visible],
                scale=self.scale,
                mask=self.seen.block(at, keys.shape[2] - queries.shape[2]),
            )
            queries = mx.depends(queries, output)
            outputs.append(output.transpose(0, 2, 1, 3))
        return (joined(outputs, axis=1),)

    def probabilities(self, at: Block, own: PerHead, saved: Sequence[mx.array], n: int) -> mx.array:
        """Return the probabilities of a block; of its queries and heads ``saved[n]`` was saved."""
        return mx.softmax(self.scores(at, own.queries, own.keys), axis=-1, precise=True)

    def score_dtype(self, dtype: mx.Dtype) -> mx.Dtype:
        """Return the dtype of the scores of queries of a dtype: the same, as MLX's own are."""
        return dtype

    def scores(self, at: Block, queries: mx.array, keys: mx.array) -> mx.array:
        """Return the scores of a block, [B, KV, H / KV * n, keys]; hidden keys have finite ones."""
        dtype = self.score_dtype(queries.dtype)
        mask = self.seen.block(at, keys.shape[2] - queries.shape[2])

        queries = queries[:, :, at.start : at.stop].astype(dtype)
        keys = keys[:, :, at.first : at.last].astype(dtype)
        folded = _folded(queries, keys.shape[1]) * (self.scale * self.unit)
        scores = folded @ keys.swapaxes(-1, -2)
        if mask is None:
            return scores

        least = mx.finfo(dtype).min
        # an addition, since MLX's choice between two arrays takes three times as long on CPUs
        if mask.dtype == mx.bool_:
            added = mx.where(mask, mx.array(0.0, dtype), mx.array(least, dtype))
        else:
            added = mx.maximum(mask.astype(dtype) * self.unit, least)
        return (scores.reshape(*queries.shape[:3], -1) + added).reshape(scores.shape)

    def by_stream(self, *arrays: mx.array) -> list[PerHead]:
        """Return arrays [B, heads, ...] in as many parts of their heads as there are."""
        split = (mx.split(a, self.parts, axis=1) for a in arrays)
        return [PerHead(*own) for own in zip(*split, strict=True)]

    def _backward(self, primals: Arrays, d_output: mx.array, outputs: Arrays) -> Arrays:
        # sum over keys of p * dp, a number a query, equals the sum of output * d_output
        shared = (d_output * outputs[0]).sum(axis=-1, keepdims=True).transpose(0, 2, 1, 3)
        heads = self.by_stream(*primals, d_output.transpose(0, 2, 1, 3), shared)
        d_queries = []
        d_keys = [_Slices(own.keys, self.width) for own in heads]
        d_values = [_Slices(own.values, self.width) for own in heads]

        for number, row in enumerate(self.blocks):
            rows = slice(row[0].start, row[0].stop)
            totals: list[mx.array | None] = [None] * self.parts
            for at in row:
                visible = slice(at.first, at.last)
                computed = []
                (group,) = self.device.rounds(enumerate(heads))
                for stream, (n, own) in group:
                    with stream:
                        kv_heads = own.keys.shape[1]
                        weights = self.probabilities(at, own, outputs[1:], number * self.parts + n)
                        d_part = _folded(own.d_output[:, :, rows], kv_heads)
                        d_weights = d_part @ own.values[:, :, visible].swapaxes(-1, -2)
                        d_scores = weights * (d_weights - _folded(own.shared[:, :, rows], kv_heads))

                        queries = _folded(own.queries[:, :, rows], kv_heads) * self.scale
                        computed.append(d_keys[n].add(d_scores.swapaxes(-1, -2) @ queries, at))
                        computed.append(d_values[n].add(weights.swapaxes(-1, -2) @ d_part, at))
                        part = (d_scores @ own.keys[:, :, visible]).astype(mx.float32)
                        if totals[n] is not None:
                            part = totals[n] + part
                        totals[n] = part

                if not self.only:
                    read = [a for h in heads for a in (h.queries, h.d_output)]
                    later = iter(mx.depends(read, [*totals, *computed]))
                    heads = [h._replace(queries=next(later), d_output=next(later)) for h in heads]

            shape = (len(totals[0]), -1, rows.stop - rows.start, primals[0].shape[-1])
            own_queries = [(t * self.scale).astype(primals[0].dtype).reshape(shape) for t in totals]
            d_queries.append(joined(own_queries, axis=1))

        others = [joined([d.concatenated() for d in own], axis=1) for own in (d_keys, d_values)]
        return mx.depends(joined(d_queries, axis=2), others), *others


def joined(parts: list[mx.array], axis: int) -> mx.array:
    """Return parts along an axis as one array."""
    if len(parts) == 1:
        return parts[0]
    return mx.concatenate(parts, axis=axis)


def _folded(x: mx.array, kv_heads: int) -> mx.array:
    """Return [B, H, T, D] as [B, KV, H / KV * T, D]: query heads of a KV head are more rows."""
    batch, heads, length, width = x.shape
    return x.reshape(batch, kv_heads, heads // kv_heads * length, width)


class _Slices:
    """A float32 sum like ``like`` [B, KV, S, D]; adding to a few keys copies only a slice."""

    def __init__(self, like: mx.array, width: int) -> None:
        self.width = width
        self.shape = like.shape
        self.dtype = like.dtype
        self.parts: dict[int, mx.array] = {}

    def add(self, part: mx.array, at: Block) -> mx.array:
        """Add to the keys of a block, all of one slice, and return the slice."""
        number, offset = divmod(at.first, self.width)
        batch, heads, keys, depth = self.shape
        width = min(self.width, keys - number * self.width)

        total = self.parts.get(number)
        part = part.astype(mx.float32)
        if part.shape[2] < width:
            if total is None:
                total = mx.zeros((batch, heads, width, depth), part.dtype)
            visible = slice(offset, offset + part.shape[2])
            total[:, :, visible] = total[:, :, visible] + part
        elif total is None:
            total = part
        else:
            total = total + part

        self.parts[number] = total
        return total

    def concatenated(self) -> mx.array:
        """Return the sum in the dtype of ``like``."""
        parts = [self.parts[number] for number in sorted(self.parts)]
        return mx.concatenate(parts, axis=2).astype(self.dtype)


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
    rows = heads = 1
    if is_watched() and not isinstance(mask, mx.array):
        count, all_heads, length, width = queries.shape
        square = math.isqrt(length * (2 * keys.shape[2] - length))  # length with as many scores
        rows, heads = attention_calls(count, all_heads, keys.shape[1], square, width)

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
    """Return whether MLX's gradient is one primitive."""
    x = mx.zeros((1, 1, 2, width), dtype)
    keys = mx.zeros((1, 1, 4, width), dtype) if fewer else x

    def attend(q: mx.array, k: mx.array, v: mx.array) -> list[mx.array]:
        return [mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0, mask=mask)]

    return gradient_has("ScaledDotProductAttentionVJP", attend, [x, keys, keys], [x])
