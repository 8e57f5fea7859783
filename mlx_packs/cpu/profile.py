"""The profile of a CPU: pieces that stay in its cache, two streams, and functions of its own."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import mlx.core as mx

from ..ops.profile import Piece, Profile
from . import exponential
from .attention import StreamAttention
from .streams import rounds, stream_count


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
    attention: type | None = StreamAttention

    stream_work: int = 1 << 22  # multiplications that are worth a stream: a tenth of a millisecond
    block_keys: int = 512  # the most keys of a block of scores where there are several blocks
    block_bytes: int = 1 << 20  # of such a block: it stays in the cache
    elements: int = 1 << 18  # of an array of single elements that is computed by rows: 1 MB

    def rounds(
        self, pieces: Iterable[Piece]
    ) -> Iterator[list[tuple[AbstractContextManager, Piece]]]:
        return rounds(pieces, self.streams)

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

    def elements_at_once(self, count: int) -> int:
        return min(self.streams * self.elements, count)

    def exp(self, x: mx.array) -> mx.array:
        """Return `mx.exp` within 4e-7 relative for -44 <= x <= 88, clipped to that in float32."""
        if x.dtype != mx.float32:
            return super().exp(x)
        return exponential.exp(x)

    def swiglu(self, gate: mx.array, up: mx.array) -> mx.array:
        if gate.dtype != mx.float32:
            return super().swiglu(gate, up)
        return exponential.swiglu(gate, up, self.elements, self.streams)

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
    ) -> mx.array:
        """Return the same by array operations, which are vectorized, unlike `mx.dequantize`."""
        if mode != "affine" or bits not in (4, 8) or scales.dtype != mx.float32:
            return super().dequantize(weight, scales, biases, group_size, bits, mode)

        codes = weight.view(mx.uint8)
        if bits == 4:  # spread two at a time: three operations on half as many bytes as weights
            pairs = codes.astype(mx.uint16)  # 00ab to 0a0b, whose lower byte comes first
            codes = ((pairs | (pairs << 4)) & 0x0F0F).view(mx.uint8)
        codes = codes.reshape(*scales.shape, group_size).astype(mx.float32)
        return (codes * scales[..., None] + biases[..., None]).reshape(len(weight), -1)


CPU = CPUProfile()
