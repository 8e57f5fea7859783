"""Quantized keys and values of a batch (4 or 8 bits): mlx-lm has one or the other, not both.

`QuantizedSequence` is mlx-lm's cache of one sequence, and knows how to become a batch.
`QuantizedBatch` does to quantized tensors, each a tuple of three arrays [B, heads, T, ...], what
`BatchKVCache` does to plain ones. Sequences are padded on the left.
"""

from collections.abc import Callable, Sequence
from typing import Any

from mlx.utils import tree_map
from mlx_lm.models.cache import BatchKVCache, KVCache, QuantizedKVCache, dynamic_roll

from ..errors import PackError
from ..runtime import mx

GROUP = 64  # numbers of a head that share a scale

Quantized = tuple[mx.array, mx.array, mx.array]  # packed numbers, scales, biases


class QuantizedSequence(QuantizedKVCache):
    """Keys and values of one sequence."""

    def merge(self, caches: Sequence["QuantizedSequence"]) -> "QuantizedBatch":
        batch = QuantizedBatch([0] * len(caches), self.bits)
        lengths = [cache.offset for cache in caches]
        longest = max(lengths)
        if longest == 0:
            return batch

        example = next(cache for cache in caches if not cache.empty())

        def rows(name: str) -> list[Quantized]:
            padded = []
            for cache, length in zip(caches, lengths, strict=True):
                stored = getattr(example if cache.empty() else cache, name)
                padding = longest - length
                padded.append(tuple(_padded(x[..., :length, :], padding) for x in stored))
            return padded

        batch.keys = _joined(rows("keys"))
        batch.values = _joined(rows("values"))
        batch.left_padding = mx.array([longest - length for length in lengths])
        batch.offset = mx.array(lengths)
        batch._idx = longest
        return batch


class QuantizedBatch(BatchKVCache):
    """Keys and values of several sequences, quantized."""

    def __init__(self, left_padding: list[int], bits: int) -> None:
        super().__init__(left_padding)
        self.bits = bits
        self.group_size = GROUP

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Quantized, Quantized]:
        """Add keys and values [B, heads, T, D], and return all."""
        before = self._idx
        tokens = keys.shape[2]
        new = [mx.quantize(x, group_size=GROUP, bits=self.bits) for x in (keys, values)]

        if self.keys is None or before + tokens > self.keys[0].shape[2]:
            more = -(-tokens // self.step) * self.step
            self._map(lambda x: x[..., :before, :])
            grown = [tree_map(lambda x: _room(x, more), each) for each in new]
            if self.keys is None:
                self.keys, self.values = grown
            else:
                self.keys, self.values = (
                    _joined([old, room], axis=2)
                    for old, room in zip((self.keys, self.values), grown, strict=True)
                )

        self._idx += tokens
        self.offset = self.offset + tokens
        for stored, added in zip((self.keys, self.values), new, strict=True):
            for array, part in zip(stored, added, strict=True):
                array[..., before : self._idx, :] = part

        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Quantized, Quantized]:
        return tree_map(lambda x: x[..., : self._idx, :], (self.keys, self.values))

    @property
    def state(self) -> tuple:
        """The arrays that are evaluated."""
        return self.keys, self.values, self.offset, self.left_padding

    def finalize(self) -> None:
        """Turn padding on the right, of prompts of different lengths, into padding on the left."""
        if self._right_padding is not None:
            padding = self._right_padding
            self._map(lambda x: dynamic_roll(x, padding[:, None], axis=2))
            self.offset = self.offset - padding
            self.left_padding += padding
            self._right_padding = None

    def filter(self, batch_indices: Sequence[int]) -> None:
        """Keep some sequences alone, and no more padding than they need."""
        self._map(lambda x: x[batch_indices])
        self.offset = self.offset[batch_indices]
        self.left_padding = self.left_padding[batch_indices]

        least = min(self.left_padding.tolist())
        if least > 0:
            self._map(lambda x: x[..., least:, :])
            self._idx -= least
            self.left_padding -= least

    def extend(self, other: "QuantizedBatch") -> None:
        offsets = mx.concatenate([self.offset, other.offset])
        if self.keys is None and other.keys is None:
            self.left_padding = mx.concatenate([self.left_padding, other.left_padding])
            self.offset = offsets
            return

        longest = max(self._idx, other._idx)
        example = self if self.keys is not None else other
        parts = [each._aligned(longest, example) for each in (self, other)]
        self.keys = _joined([keys for keys, _, _ in parts])
        self.values = _joined([values for _, values, _ in parts])
        self.left_padding = mx.concatenate([padding for _, _, padding in parts])
        self.offset = offsets
        self._idx = longest

    def _aligned(
        self, longest: int, example: "QuantizedBatch"
    ) -> tuple[Quantized, Quantized, mx.array]:
        """Return keys, values and padding for so many tokens; an empty batch has only padding."""
        missing = longest - self._idx
        if self.keys is None:
            rows = self.offset.shape[0]
            blank = tree_map(
                lambda x: mx.zeros((rows, x.shape[1], longest, x.shape[3]), x.dtype),
                (example.keys, example.values),
            )
            return (*blank, self.left_padding + missing)

        keys, values = tree_map(
            lambda x: _padded(x[..., : self._idx, :], missing), self.keys_and_values()
        )
        return keys, values, self.left_padding + missing

    def extract(self, idx: int) -> QuantizedSequence:
        """Return one sequence, without padding."""
        padding = self.left_padding.tolist()[idx]
        sequence = QuantizedSequence(GROUP, self.bits)
        sequence.keys, sequence.values = tree_map(
            lambda x: mx.contiguous(x[idx : idx + 1, :, padding : self._idx]),
            (self.keys, self.values),
        )
        sequence.offset = self._idx - padding
        return sequence

    @property
    def nbytes(self) -> int:
        if self.keys is None:
            return 0
        return sum(array.nbytes for array in (*self.keys, *self.values))

    def _map(self, change: Callable[[mx.array], mx.array]) -> None:
        if self.keys is not None:
            self.keys, self.values = tree_map(change, (self.keys, self.values))


def quantized(caches: Sequence[Any], bits: int, name: str) -> list[QuantizedSequence]:
    """Return empty quantized caches; a PackError if the model's are not plain keys and values."""
    for cache in caches:
        if type(cache) is not KVCache:
            raise PackError(
                f"--kv-bits {bits}: {name} keeps a {type(cache).__name__}, which is not quantized.",
                "unsupported",
            )
    return [QuantizedSequence(GROUP, bits) for _ in caches]


def _padded(x: mx.array, tokens: int) -> mx.array:
    """Return x [B, heads, T, ...] with so many tokens of zeros on the left."""
    if tokens == 0:
        return x
    return mx.pad(x, ((0, 0), (0, 0), (tokens, 0), (0, 0)))


def _room(x: mx.array, tokens: int) -> mx.array:
    return mx.zeros((*x.shape[:2], tokens, x.shape[3]), x.dtype)


def _joined(parts: Sequence[Quantized], axis: int = 0) -> Quantized:
    a, b, c = (mx.concatenate(arrays, axis=axis) for arrays in zip(*parts, strict=True))
    return a, b, c
