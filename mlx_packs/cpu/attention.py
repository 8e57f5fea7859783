"""Attention by blocks on a CPU, whose streams share the heads.

A block has some of the keys, so that its scores stay in the cache; blocks of the same queries are
merged by their largest score and their sum. Probabilities are saved only if one block is all.
"""

from typing import ClassVar, NamedTuple

import mlx.core as mx

from ..ops.attention_blocks import Arrays, Block, BlockAttention, Heads, joined
from .exponential import exp2


class _Partial(NamedTuple):
    """The state of a block of queries over the keys so far, float32."""

    largest: mx.array  # the largest score, [..., 1]
    total: mx.array  # sum of 2^(score - largest), [..., 1]
    output: mx.array  # sum of 2^(score - largest) * value, [..., D]

    def merged(self, other: "_Partial") -> "_Partial":
        largest = mx.maximum(self.largest, other.largest)
        own = exp2(self.largest - largest)
        others = exp2(other.largest - largest)
        total = self.total * own + other.total * others
        return _Partial(largest, total, self.output * own + other.output * others)


def _powers(scores: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Return 2^(score - largest) [..., keys], their sum and the largest, [..., 1]."""
    largest = scores.max(axis=-1, keepdims=True)
    powers = exp2(scores - largest)
    # as a product a sum takes a fifth of the time on CPUs
    return powers, powers @ mx.ones((scores.shape[-1], 1)), largest


class StreamAttention(BlockAttention):
    """Attention whose scores are float32, times log2(e)."""

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
                for stream, (n, own) in group:
                    with stream:
                        part, weights = self._block_output(at, own)
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
            own_outputs = [
                (each.output * mx.reciprocal(each.total))
                .astype(queries.dtype)
                .reshape(len(queries), -1, rows, values.shape[-1])
                .transpose(0, 2, 1, 3)
                for each in partial
            ]
            outputs.append(joined(own_outputs, axis=2))
        return (joined(outputs, axis=1), *saved)

    def _block_output(self, at: Block, own: Heads) -> tuple[_Partial, mx.array | None]:
        """Return the output of a block, and the probabilities, if they are saved."""
        powers, total, largest = _powers(self.scores(at, own.queries, own.keys))
        visible = own.values[:, :, at.first : at.last]
        if self.only:
            saved = (powers * mx.reciprocal(total)).astype(own.queries.dtype)
            return _Partial(largest, mx.ones_like(total), saved @ visible), saved

        output = (powers.astype(own.queries.dtype) @ visible).astype(mx.float32)
        return _Partial(largest, total, output), None

    def probabilities(self, at: Block, own: Heads, saved: Arrays, n: int) -> mx.array:
        """Return the probabilities of a block, from what the forward pass saved of its queries."""
        if self.only:
            return saved[n]
        scores = self.scores(at, own.queries, own.keys)
        return exp2(scores - saved[n]).astype(own.queries.dtype)
