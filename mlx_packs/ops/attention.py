"""Attention in training: softmax(scale Q K^T + mask) V with grouped heads, K and V never repeated.

Scores exist for one block of queries and keys at a time, forward and backward: the backward makes
each block again from Q, K and V instead of keeping T x S probabilities; blocks of the same queries
are merged by their largest score and their sum (https://arxiv.org/abs/2205.14135). Only where one
block is all, on a CPU, it is saved. Keys that no query of a block sees are left out. With CUDA, and
on Metal where MLX has a fused gradient (`has_fused_gradient`), forward and backward are MLX's. On
Metal otherwise a block has all keys, and its forward is MLX's.
"""

import functools
import io
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from .. import runtime
from .exponential import exp2
from .streams import rounds, stream_count
from .tiling import tiling
from .watchdog import AttentionSizes, attention_calls, watched_chip

Mask = mx.array | str | None
Arrays = Sequence[mx.array]

_LOG2_E = 1.4426950408889634


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
    on_cpu = runtime.on_cpu()
    seen = _Seen(mask, segments)
    fused = segments is None and has_fused_gradient(queries.dtype, queries.shape[-1], mask)
    if fused or (not on_cpu and mx.cuda.is_available()):
        return mlx_attention(queries, keys, values, scale, seen.full_mask())
    batch, heads, length, _ = queries.shape
    count = stream_count()
    even = keys.shape[1] % count == 0 and seen.same_for_all_heads
    parts = count if even else 1
    blocks, width = seen.blocks(length, keys.shape[2], 4 * batch * heads // parts, on_cpu)
    function = _Attention(scale, seen, blocks, width, on_cpu, parts).function()
    output = function(queries, keys, values)[0]
    return output.transpose(0, 2, 1, 3)


def mlx_attention(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Mask
) -> mx.array:
    """Return MLX's own attention, in several calls where one would keep a display waiting."""
    chip = watched_chip()
    rows = heads = 1
    if chip is not None and not isinstance(mask, mx.array):
        count, all_heads, length, width = queries.shape
        sizes = AttentionSizes(count, all_heads, keys.shape[1], length, width)
        rows, heads = attention_calls(sizes, chip)

    def attend(*arrays: mx.array) -> mx.array:
        return mx.fast.scaled_dot_product_attention(*arrays, scale=scale, mask=mask)

    def by_heads(*arrays: mx.array) -> mx.array:
        return _in_parts(attend, arrays, heads, axis=1)

    return _in_parts(by_heads, (queries, keys, values), rows, axis=0)


def _in_parts(function: Callable[..., mx.array], arrays: Arrays, count: int, axis: int) -> mx.array:
    """Return the joined results of a function of parts of arrays along an axis.

    Parts of an array that has less than there are parts serve several.
    """
    if count == 1:
        return function(*arrays)
    parts = []
    for array in arrays:
        own = mx.split(array, min(count, array.shape[axis]), axis)
        parts.append([part for part in own for _ in range(count // len(own))])
    return mx.concatenate([function(*part) for part in zip(*parts, strict=True)], axis)


def has_fused_gradient(dtype: mx.Dtype, width: int, mask: Mask) -> bool:
    """Return whether MLX's own attention keeps no scores for its gradient on this device.

    It is so on Metal since MLX 0.32.4, with heads of ``width`` and no array as a mask.
    """
    if runtime.on_cpu() or isinstance(mask, mx.array):
        return False
    return _has_fused_gradient(dtype, width, mask)


@functools.cache
def _has_fused_gradient(dtype: mx.Dtype, width: int, mask: str | None) -> bool:
    """Return whether the gradient of MLX's attention is one primitive.

    The graph of a gradient is laid out, not computed: its primitives tell.
    """
    x = mx.zeros((1, 1, 2, width), dtype)

    def attend(q: mx.array, k: mx.array, v: mx.array) -> list[mx.array]:
        return [mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0, mask=mask)]

    _, gradients = mx.vjp(attend, [x, x, x], [x])
    graph = io.StringIO()
    mx.export_to_dot(graph, *gradients)
    return "ScaledDotProductAttentionVJP" in graph.getvalue()


def scores_are_cut(heads: int, length: int) -> bool:
    """Return whether a CPU computes T x T scores of so many heads (of all rows) by blocks."""
    return runtime.on_cpu() and 4 * heads * length**2 > stream_count() * tiling().score_bytes


class _Block(NamedTuple):
    """Queries [start, stop) and the keys [first, last) that any of them sees."""

    start: int
    stop: int
    first: int
    last: int


class _Seen(NamedTuple):
    """The keys that a query sees."""

    mask: Mask
    segments: mx.array | None

    @property
    def same_for_all_heads(self) -> bool:
        return not isinstance(self.mask, mx.array) or self.mask.ndim < 3 or self.mask.shape[-3] == 1

    def full_mask(self) -> Mask:
        """Return the mask of all queries and keys."""
        if self.segments is None:
            return self.mask
        length = self.segments.shape[1]
        return self.block(_Block(0, length, 0, length), 0)

    def blocks(
        self, length: int, keys_length: int, pair_bytes: int, on_cpu: bool
    ) -> tuple[list[list[_Block]], int]:
        """Return blocks in order, those of the same queries together, and their most keys.

        One pair of a query and a key has scores of ``pair_bytes``. On a CPU keys are cut too.
        """
        sizes = tiling()
        width, room, least = keys_length, sizes.score_bytes, sizes.least_queries
        if on_cpu and pair_bytes * length * keys_length > room:
            width, room = min(sizes.block_keys, keys_length), sizes.block_bytes
        rows = max(least, room // (pair_bytes * width) // least * least)
        firsts = None if self.segments is None else _first_keys(self.segments)
        blocks = []
        for start in range(0, length, rows):
            stop = min(start + rows, length)
            first = int(firsts[start]) if firsts is not None else 0
            last = stop + keys_length - length if isinstance(self.mask, str) else keys_length
            cuts = [first, *range((first // width + 1) * width, last, width), last]
            blocks.append([_Block(start, stop, *keys) for keys in itertools.pairwise(cuts)])
        return blocks, width

    def block(self, at: _Block, offset: int) -> mx.array | None:
        """Return the mask of a block for [B, H, queries, keys]; query t is at key t + offset."""
        if self.mask is None:
            return None
        if not isinstance(self.mask, str):
            rows = slice(at.start, at.stop) if self.mask.shape[-2] > 1 else slice(None)
            columns = slice(at.first, at.last) if self.mask.shape[-1] > 1 else slice(None)
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


def _folded(x: mx.array, kv_heads: int) -> mx.array:
    """Return [B, H, T, D] as [B, KV, H / KV * T, D]: query heads of a KV head are more rows."""
    batch, heads, length, width = x.shape
    return x.reshape(batch, kv_heads, heads // kv_heads * length, width)


class _Partial(NamedTuple):
    """The state of a block of queries over the keys so far, float32."""

    largest: mx.array  # the largest score, [..., 1]
    total: mx.array  # sum of 2^(score - largest), [..., 1]
    output: mx.array  # sum of 2^(score - largest) * value, [..., D]

    def merged(self, other: "_Partial") -> "_Partial":
        """Return the state over the keys of both."""
        largest = mx.maximum(self.largest, other.largest)
        own, others = exp2(self.largest - largest), exp2(other.largest - largest)
        total = self.total * own + other.total * others
        return _Partial(largest, total, self.output * own + other.output * others)


def _powers(scores: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Return 2^(score - largest) [..., keys], their sum and the largest, [..., 1]."""
    largest = scores.max(axis=-1, keepdims=True)
    powers = exp2(scores - largest)
    # as a product a sum takes a fifth of the time on CPUs
    return powers, powers @ mx.ones((scores.shape[-1], 1)), largest


class _Heads(NamedTuple):
    """The arrays [B, heads, T, ...] that one CPU stream reads."""

    queries: mx.array
    keys: mx.array
    values: mx.array
    d_output: mx.array | None = None  # in the backward pass the gradient of its output
    shared: mx.array | None = None  # in the backward pass its sum of output * gradient


@dataclass(frozen=True)
class _Attention:
    """Attention over some blocks, and its gradient.

    MLX computes independent work side by side; each block therefore depends on the one before.
    """

    scale: float
    seen: _Seen
    blocks: list[list[_Block]]
    width: int  # the most keys of a block
    on_cpu: bool
    parts: int  # of the heads, whose blocks are computed at once

    @property
    def only(self) -> bool:
        """Whether there is only one block."""
        return len(self.blocks) == 1 and len(self.blocks[0]) == 1

    def function(self) -> Callable[..., tuple[mx.array, ...]]:
        """Return the differentiable function.

        It gives the output [B, T, H, D], as the next projection keeps it for its own backward
        pass, and on a CPU for each part of the heads: the probabilities of the only block, or for
        the blocks of the same queries log2 of the sum of 2^score.
        """

        @mx.custom_function
        def attend(queries: mx.array, keys: mx.array, values: mx.array) -> tuple[mx.array, ...]:
            if self.on_cpu:
                return self._forward(queries, keys, values)
            return (self._fused(queries, keys, values),)

        @attend.vjp
        def attend_vjp(primals: Arrays, cotangents: Arrays, outputs: Arrays) -> Arrays:
            return self._backward(primals, cotangents[0], outputs)

        return attend

    def _by_stream(self, *arrays: mx.array) -> list[_Heads]:
        split = (mx.split(a, self.parts, axis=1) for a in arrays)
        return [_Heads(*own) for own in zip(*split, strict=True)]

    def _scores(self, at: _Block, queries: mx.array, keys: mx.array) -> mx.array:
        """Return the scores of a block, [B, KV, H / KV * n, keys].

        On CPUs they are float32, times log2(e); on GPUs in the dtype of the queries, as MLX's own
        are. Those of hidden keys are finite, so that a block may hide all keys from a query.
        """
        dtype, unit = (mx.float32, _LOG2_E) if self.on_cpu else (queries.dtype, 1.0)
        mask = self.seen.block(at, keys.shape[2] - queries.shape[2])
        queries = queries[:, :, at.start : at.stop].astype(dtype)
        keys = keys[:, :, at.first : at.last].astype(dtype)
        folded = _folded(queries, keys.shape[1]) * (self.scale * unit)
        scores = folded @ keys.swapaxes(-1, -2)
        if mask is None:
            return scores
        least = mx.finfo(dtype).min
        # an addition, since MLX's choice between two arrays takes three times as long on CPUs
        if mask.dtype == mx.bool_:
            added = mx.where(mask, mx.array(0.0, dtype), mx.array(least, dtype))
        else:
            added = mx.maximum(mask.astype(dtype) * unit, least)
        return (scores.reshape(*queries.shape[:3], -1) + added).reshape(scores.shape)

    def _fused(self, queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
        """Return the output by MLX's own attention, block by block."""
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
        return _joined(outputs, axis=1)

    def _block_output(self, at: _Block, own: _Heads) -> tuple[_Partial, mx.array | None]:
        """Return the output of a block, and the probabilities, if they are saved."""
        powers, total, largest = _powers(self._scores(at, own.queries, own.keys))
        visible = own.values[:, :, at.first : at.last]
        if self.only:
            saved = (powers * mx.reciprocal(total)).astype(own.queries.dtype)
            return _Partial(largest, mx.ones_like(total), saved @ visible), saved
        output = (powers.astype(own.queries.dtype) @ visible).astype(mx.float32)
        return _Partial(largest, total, output), None

    def _probabilities(self, at: _Block, own: _Heads, saved: mx.array | None) -> mx.array:
        """Return those of a block, from what the forward pass saved of its queries."""
        if self.only and self.on_cpu:
            return saved
        scores = self._scores(at, own.queries, own.keys)
        if self.on_cpu:
            return exp2(scores - saved).astype(own.queries.dtype)
        return mx.softmax(scores, axis=-1, precise=True)

    def _forward(self, queries: mx.array, keys: mx.array, values: mx.array) -> Arrays:
        heads, outputs, saved = self._by_stream(queries, keys, values), [], []
        for row in self.blocks:
            partial: list[_Partial | None] = [None] * self.parts
            for at in row:
                (group,) = rounds(enumerate(heads))
                for stream, (n, own) in group:
                    with stream:
                        part, weights = self._block_output(at, own)
                        partial[n] = part if partial[n] is None else partial[n].merged(part)
                    saved += [weights] if self.only else []
                if not self.only:
                    later = mx.depends([h.queries for h in heads], [a for p in partial for a in p])
                    heads = [h._replace(queries=q) for h, q in zip(heads, later, strict=True)]
            if not self.only:
                saved += [each.largest + mx.log2(each.total) for each in partial]
            rows = row[0].stop - row[0].start
            own_outputs = [
                (each.output * mx.reciprocal(each.total))
                .astype(queries.dtype)
                .reshape(len(queries), -1, rows, values.shape[-1])
                .transpose(0, 2, 1, 3)
                for each in partial
            ]
            outputs.append(_joined(own_outputs, axis=2))
        return (_joined(outputs, axis=1), *saved)

    def _backward(self, primals: Arrays, d_output: mx.array, outputs: Arrays) -> Arrays:
        # sum over keys of p * dp, a number a query, equals that of output * d_output
        shared = (d_output * outputs[0]).sum(axis=-1, keepdims=True).transpose(0, 2, 1, 3)
        heads = self._by_stream(*primals, d_output.transpose(0, 2, 1, 3), shared)
        d_queries = []
        d_keys = [_Slices(own.keys, self.width) for own in heads]
        d_values = [_Slices(own.values, self.width) for own in heads]
        for number, row in enumerate(self.blocks):
            rows = slice(row[0].start, row[0].stop)
            totals: list[mx.array | None] = [None] * self.parts
            for at in row:
                visible, computed = slice(at.first, at.last), []
                (group,) = rounds(enumerate(heads))
                for stream, (n, own) in group:
                    with stream:
                        saved = outputs[1 + number * self.parts + n] if self.on_cpu else None
                        kv_heads = own.keys.shape[1]
                        weights = self._probabilities(at, own, saved)
                        d_part = _folded(own.d_output[:, :, rows], kv_heads)
                        d_weights = d_part @ own.values[:, :, visible].swapaxes(-1, -2)
                        d_scores = weights * (d_weights - _folded(own.shared[:, :, rows], kv_heads))
                        queries = _folded(own.queries[:, :, rows], kv_heads) * self.scale
                        computed.append(d_keys[n].add(d_scores.swapaxes(-1, -2) @ queries, at))
                        computed.append(d_values[n].add(weights.swapaxes(-1, -2) @ d_part, at))
                        part = (d_scores @ own.keys[:, :, visible]).astype(mx.float32)
                        totals[n] = part if totals[n] is None else totals[n] + part
                if not self.only:
                    read = [a for h in heads for a in (h.queries, h.d_output)]
                    later = iter(mx.depends(read, [*totals, *computed]))
                    heads = [h._replace(queries=next(later), d_output=next(later)) for h in heads]
            shape = (len(totals[0]), -1, rows.stop - rows.start, primals[0].shape[-1])
            own_queries = [(t * self.scale).astype(primals[0].dtype).reshape(shape) for t in totals]
            d_queries.append(_joined(own_queries, axis=1))
        others = [_joined([d.concatenated() for d in own], axis=1) for own in (d_keys, d_values)]
        return mx.depends(_joined(d_queries, axis=2), others), *others


def _joined(parts: list[mx.array], axis: int) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=axis)


class _Slices:
    """A float32 sum like ``like`` [B, KV, S, D]; adding to a few keys copies no more than a slice."""

    def __init__(self, like: mx.array, width: int) -> None:
        self.width, self.shape, self.dtype = width, like.shape, like.dtype
        self.parts: dict[int, mx.array] = {}

    def add(self, part: mx.array, at: _Block) -> mx.array:
        """Add to the keys of a block, all of one slice, and return the slice."""
        number, offset = divmod(at.first, self.width)
        batch, heads, keys, depth = self.shape
        width = min(self.width, keys - number * self.width)
        total, part = self.parts.get(number), part.astype(mx.float32)
        if part.shape[2] < width:
            total = mx.zeros((batch, heads, width, depth), part.dtype) if total is None else total
            visible = slice(offset, offset + part.shape[2])
            total[:, :, visible] = total[:, :, visible] + part
        else:
            total = part if total is None else total + part
        self.parts[number] = total
        return total

    def concatenated(self) -> mx.array:
        """Return the sum in the dtype of ``like``."""
        parts = [self.parts[number] for number in sorted(self.parts)]
        return mx.concatenate(parts, axis=2).astype(self.dtype)
