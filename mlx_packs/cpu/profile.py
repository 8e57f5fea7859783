"""The profile of a CPU: pieces that stay in its cache, two streams, and functions of its own.

Pieces of one large operation are computed at the same time, on parallel streams. MLX computes the
operations of a stream one by one, and the threads of a BLAS wait for each other by spinning, so
that another busy program makes both slow. Streams block instead. Pieces are assigned in rounds,
each of which waits for the one before: MLX hands out no more work while some hundred operations of
all streams together wait, and a stream far ahead would leave the others none.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import ClassVar, NamedTuple

import mlx.core as mx

from .. import runtime
from ..cores import usable_cores
from ..ops.attention import Arrays, Block, BlockAttention, PerHead, joined
from ..ops.profile import Piece, Profile
from . import exponential
from .exponential import exp2


def stream_count() -> int:
    """Return how many pieces are computed at once: two where a product leaves a core idle."""
    if runtime.COMPILES or not core_is_idle():
        return 1
    return 2


def core_is_idle() -> bool:
    # several threads of a BLAS take the cores themselves, and its products then queue for them
    blas = runtime.BLAS
    return (blas.threads == 1 or blas.name == "reference") and usable_cores() > 1


@cache
def second_stream() -> mx.ThreadLocalStream:
    """Return the stream beside the current one, of each thread its own."""
    return mx.new_thread_local_stream(mx.cpu)


class _Partial(NamedTuple):
    """The state of a block of queries over the keys so far, float32."""

    largest: mx.array  # the largest score, [..., 1]
    total: mx.array  # sum of 2^(score - largest), [..., 1]
    output: mx.array  # sum of 2^(score - largest) * value, [..., D]

    def merged(self, other: "_Partial") -> "_Partial":
        largest = mx.maximum(self.largest, other.largest)
        factor = exp2(self.largest - largest)
        of_other = exp2(other.largest - largest)
        total = self.total * factor + other.total * of_other
        return _Partial(largest, total, self.output * factor + other.output * of_other)


def _powers(scores: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Return 2^(score - largest) [..., keys], their sum and the largest, [..., 1]."""
    largest = scores.max(axis=-1, keepdims=True)
    powers = exp2(scores - largest)
    # as a product a sum takes a fifth of the time on CPUs
    return powers, powers @ mx.ones((scores.shape[-1], 1)), largest


class StreamAttention(BlockAttention):
    """Attention whose scores are float32, times log2(e); streams share the heads.

    A block has some of the keys, so that its scores stay in the cache; blocks of the same queries
    are merged by their largest score and their sum. Probabilities are saved only if one block is
    all.
    """

    unit: ClassVar[float] = 1.4426950408889634

    def score_dtype(self, dtype: mx.Dtype) -> mx.Dtype:
        return mx.float32

    def forward(self, queries: mx.array, keys: mx.array, values: mx.array) -> Arrays:
        """Return the output; saved is log2 of the sum of 2^score, or the only probabilities."""
        heads = self.by_stream(queries, keys, values)
        outputs = []
        saved = []

        for row in self.blocks:
            partial: list[_Partial | None] = [None] * self.parts
            for at in row:
                (group,) = self.device.rounds(enumerate(heads))
                for stream, (n, of_heads) in group:
                    with stream:
                        part, weights = self._block_output(at, of_heads)
                        if partial[n] is not None:
                            part = partial[n].merged(part)
                        partial[n] = part
                    if self.only:
                        saved.append(weights)

                if not self.only:
                    later = mx.depends([h.queries for h in heads], [a for p in partial for a in p])
                    heads = [h._replace(queries=q) for h, q in zip(heads, later, strict=True)]
            if not self.only:
                saved += [each.largest + mx.log2(each.total) for each in partial]

            rows = row[0].stop - row[0].start
            by_stream = [
                (each.output * mx.reciprocal(each.total))
                .astype(queries.dtype)
                .reshape(len(queries), -1, rows, values.shape[-1])
                .transpose(0, 2, 1, 3)
                for each in partial
            ]
            outputs.append(joined(by_stream, axis=2))
        return (joined(outputs, axis=1), *saved)

    def _block_output(self, at: Block, heads: PerHead) -> tuple[_Partial, mx.array | None]:
        """Return the output of a block, and the probabilities, if they are saved."""
        powers, total, largest = _powers(self.scores(at, heads.queries, heads.keys))
        visible = heads.values[:, :, at.first : at.last]
        if self.only:
            saved = (powers * mx.reciprocal(total)).astype(heads.queries.dtype)
            return _Partial(largest, mx.ones_like(total), saved @ visible), saved

        output = (powers.astype(heads.queries.dtype) @ visible).astype(mx.float32)
        return _Partial(largest, total, output), None

    def probabilities(self, at: Block, own: PerHead, saved: Arrays, n: int) -> mx.array:
        """Return the probabilities of a block, from what the forward pass saved of its queries."""
        if self.only:
            return saved[n]
        scores = self.scores(at, own.queries, own.keys)
        return exp2(scores - saved[n]).astype(own.queries.dtype)


@dataclass(frozen=True)
class CPUProfile(Profile):
    """Sizes of pieces, and what a CPU computes in another way than plain MLX."""

    slice_weights: int = 1 << 20
    score_bytes: int = 2 << 20
    logit_bytes: int = 1 << 20
    streams: int = field(default_factory=stream_count)
    dtype: mx.Dtype | None = mx.float32
    has_fused_kernels: bool = False
    saves_passes: bool = False
    # The weights are read once then; from here on, larger arrays cost more (benchmarks/LOG.md).
    tree_inputs: float = 1024
    attention: type | None = StreamAttention

    stream_work: int = 1 << 22  # multiplications that are worth a stream: a tenth of a millisecond
    block_keys: int = 512  # the most keys of a block of scores where there are several blocks
    block_bytes: int = 1 << 20  # of such a block: it stays in the cache
    elements: int = 1 << 18  # of an array of single elements that is computed by rows: 1 MB

    def rounds(
        self, pieces: Iterable[Piece]
    ) -> Iterator[list[tuple[AbstractContextManager, Piece]]]:
        """Yield pieces with their streams, as many at a time; the first is the current one."""
        group: list[tuple[AbstractContextManager, Piece]] = []
        for piece in pieces:
            stream = mx.stream(second_stream()) if group else nullcontext()
            group.append((stream, piece))
            if len(group) == self.streams:
                yield group
                group = []

        if group:
            yield group

    def slice_size(self, shape: tuple[int, int], rows: int) -> int:
        """Return the rows of a slice; of a large product there is at least one for each stream."""
        size = super().slice_size(shape, rows)
        outputs, width = shape
        if rows * width * outputs < self.streams * self.stream_work:
            return size

        multiple = self.slice_rows
        return min(size, -(-outputs // self.streams // multiple) * multiple)

    def score_block(self, pair_bytes: int, length: int, keys_length: int) -> tuple[int, int]:
        """Return the queries and keys of a block; keys are cut where there are several blocks."""
        if pair_bytes * length * keys_length <= self.score_bytes:
            return super().score_block(pair_bytes, length, keys_length)
        keys = min(self.block_keys, keys_length)
        return self.whole_queries(self.block_bytes // (pair_bytes * keys)), keys

    def cuts_scores(self, heads: int, length: int) -> bool:
        """Return whether T x T scores of all heads (of all rows) are several blocks."""
        return 4 * heads * length**2 > self.streams * self.score_bytes

    def exp(self, x: mx.array) -> mx.array:
        """Return `mx.exp` within 4e-7 relative for -44 <= x <= 88, clipped to that in float32."""
        if x.dtype != mx.float32:
            return super().exp(x)
        return exponential.exp(x)

    def swiglu(self, gate: mx.array, up: mx.array) -> mx.array:
        if gate.dtype != mx.float32:
            return super().swiglu(gate, up)
        return exponential.swiglu(gate, up, self.elements, self.rounds)

    def gelu(self, x: mx.array) -> mx.array:
        if x.dtype != mx.float32:
            return super().gelu(x)
        return exponential.gelu(x)

    def matmul(self, x: mx.array, weight: mx.array) -> mx.array:
        """Return x @ weight.T; streams share the rows of a large product, in both directions."""
        rows = x.reshape(-1, x.shape[-1])
        is_large = len(rows) * weight.size >= self.streams * self.stream_work
        if not is_large or not 1 < self.streams <= len(rows):
            return super().matmul(x, weight)

        step = -(-len(rows) // self.streams)
        parts = []
        for group in self.rounds(mx.split(rows, range(step, len(rows), step))):
            for stream, part in group:
                with stream:
                    parts.append(part @ weight.T)
        return mx.concatenate(parts).reshape(*x.shape[:-1], -1)

    def dequantize(
        self,
        weight: mx.array,
        scales: mx.array,
        biases: mx.array | None,
        group_size: int,
        bits: int,
        mode: str,
        dtype: mx.Dtype | None = None,
    ) -> mx.array:
        """Return the same, by slices that streams share."""
        of_row = scales[0].size * group_size  # of a weight, or an expert
        size = max(1, self.slice_weights // of_row)
        parts = []
        for group in self.rounds(range(0, len(weight), size)):
            for stream, start in group:
                at = slice(start, start + size)
                with stream:
                    bias = None if biases is None else biases[at]
                    arrays = weight[at], scales[at], bias
                    parts.append(self._dequantized(*arrays, group_size, bits, mode, dtype))
        return mx.concatenate(parts)

    def _dequantized(
        self, weight: mx.array, scales: mx.array, biases: mx.array | None, *how
    ) -> mx.array:
        """Return a slice by array operations, which are vectorized, unlike `mx.dequantize`."""
        group_size, bits, mode, dtype = how
        if mode != "affine" or not scales.dtype == (dtype or mx.float32) == mx.float32:
            return super().dequantize(weight, scales, biases, *how)

        codes = weight.view(mx.uint8)
        if bits == 4:  # spread two at a time: three operations on half as many bytes as weights
            pairs = codes.astype(mx.uint16)  # 00ab to 0a0b, whose lower byte comes first
            codes = ((pairs | (pairs << 4)) & 0x0F0F).view(mx.uint8)
        elif bits != 8:
            codes = _unpacked(codes, bits)
        codes = codes.reshape(*scales.shape, group_size).astype(mx.float32)
        return (codes * scales[..., None] + biases[..., None]).reshape(*weight.shape[:-1], -1)


def _unpacked(packed: mx.array, bits: int) -> mx.array:
    """Return the codes of 2, 3, 5 or 6 bits in these bytes, whose lowest bits come first."""
    total = math.lcm(bits, 8)  # of the bytes that begin and end with a code
    packed = packed.reshape(-1, total // 8).astype(mx.uint16)
    codes = []
    for start in range(0, total, bits):
        byte, shift = divmod(start, 8)
        code = packed[:, byte]
        if shift + bits > 8:  # the code continues in the next byte
            code = code | (packed[:, byte + 1] << 8)
        codes.append((code >> shift) & (2**bits - 1))
    return mx.stack(codes, axis=-1)


CPU = CPUProfile()
