"""The ranks of a run, and what they exchange through `mx.distributed`: gradients, above all.

A rank is one process, on a machine of its own or beside others. The ranks of a run take the same
batches, each its share of every one, so that all of them hold the same weights at any time.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from ..runtime import mx

T = TypeVar("T")
_CHUNK = 1 << 26  # bytes that are sent at once


class Group:
    """The ranks of a run. ``Group()`` is a single process: every collective returns its input.

    ``ranks`` is MLX's group, also as ``native``; None for a single process.
    """

    def __init__(self, ranks: Any = None) -> None:
        self.native = ranks
        self.rank: int = 0
        self.size: int = 1
        if ranks is not None:
            self.rank = ranks.rank()
            self.size = ranks.size()

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one that writes and prints."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        return self.size == 1

    @property
    def batch_shares(self) -> int:
        """Number of ranks that share a batch."""
        return self.size

    def norm(self, norm: mx.array) -> mx.array:
        """Return the L2 norm of gradients, given the norm of the own: all ranks have the same."""
        return norm

    def union(self, arrays: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Return the arrays of all ranks by name, which have the same ones."""
        return dict(arrays)

    def sum(self, array: mx.array) -> mx.array:
        """The arrays must have the same shape and dtype on all ranks."""
        if self.is_alone:
            return array
        return mx.distributed.all_sum(array, group=self.native)

    def joined(self, array: mx.array) -> mx.array:
        """Return the rows of all ranks [size x B, ...], given own ones [B, ...].

        Gradients reach the own rows only: added over the ranks, they equal the gradients of one
        rank that has all rows.
        """
        if self.is_alone:
            return array

        others = mx.distributed.all_gather(mx.stop_gradient(array), group=self.native)
        start = self.rank * len(array)
        stop = start + len(array)
        return mx.concatenate([others[:start], array, others[stop:]])

    def counted_once(self, array: mx.array) -> mx.array:
        """Keep the value on rank 0 only, the gradient on all: a sum over ranks counts it once."""
        if self.is_first:
            return array
        return array - mx.stop_gradient(array)

    def highest(self, *numbers: int) -> list[int]:
        """Return the element-wise maximum over all ranks."""
        if self.is_alone:
            return list(numbers)

        own = mx.array(numbers, mx.int64)[None]
        highest = mx.distributed.all_gather(own, group=self.native).max(axis=0)
        mx.eval(highest)
        return highest.tolist()

    def gathered(self, content: bytes) -> list[bytes]:
        if self.is_alone:
            return [content]

        sizes = mx.distributed.all_gather(mx.array([len(content)], mx.int64), group=self.native)
        mx.eval(sizes)

        padded = np.zeros((1, max(*sizes.tolist(), 1)), np.uint8)
        padded[0, : len(content)] = np.frombuffer(content, np.uint8)

        rows = mx.distributed.all_gather(mx.array(padded), group=self.native)
        mx.eval(rows)
        return [np.array(rows[i, :n]).tobytes() for i, n in enumerate(sizes.tolist())]

    def from_first(self, content: bytes) -> bytes:
        """Return the bytes of rank 0; the argument of the others is ignored."""
        if self.is_alone:
            return content

        own = content if self.is_first else b""
        starts = range(0, self.highest(len(own))[0], _CHUNK)
        return b"".join(self.gathered(own[start : start + _CHUNK])[0] for start in starts)

    def map(
        self, function: Callable[[T], Sequence[np.ndarray]], items: Sequence[T]
    ) -> list[list[np.ndarray]]:
        """Return a function's arrays for every item, each computed by one rank."""
        own = [list(map(np.asarray, function(item))) for item in items[self.rank :: self.size]]
        if self.is_alone:
            return own

        content = io.BytesIO()
        named = {f"{i}.{j}": a for i, arrays in enumerate(own) for j, a in enumerate(arrays)}
        np.savez(content, **named)

        results: list[list[np.ndarray]] = [[] for _ in items]
        for rank, received in enumerate(self.gathered(content.getvalue())):
            with np.load(io.BytesIO(received), allow_pickle=False) as arrays:
                for name in sorted(arrays.files, key=lambda n: tuple(map(int, n.split(".")))):
                    number = int(name.partition(".")[0])
                    results[rank + number * self.size].append(arrays[name])

        return results


ALONE = Group()
_current = ALONE


def group() -> Group:
    return _current


def join(ranks: Group) -> None:
    """Make a group the only one of this process."""
    global _current
    _current = ranks


_PART = 1 << 20  # numbers that are sent together


def summed_over_ranks(
    gradients: dict, count: mx.array, dtype: mx.Dtype = mx.float32
) -> tuple[dict, mx.array]:
    """Return the sum of gradients and counts over the ranks. With one rank they are unchanged.

    Each part is given to MLX by itself, the last layers first: its exchange begins when the
    backward pass has come so far, and lasts while it continues. In half precision gradients are
    sent as means over all targets, since sums can be out of range.

    ``gradients`` are a tree, of sums over targets; ``count`` of these is a scalar. They are sent
    and added in ``dtype``, and returned in their own.
    """
    ranks = group()
    if ranks.batch_shares == 1:
        return gradients, count

    count = ranks.sum(count.astype(mx.float32))
    scale = mx.maximum(count, 1) if dtype != mx.float32 else 1.0

    named = tree_flatten(gradients)
    parts: list[list[tuple[str, mx.array]]] = [[]]
    for name, array in reversed(named):  # the last layers have theirs first
        if parts[-1] and sum(a.size for _, a in parts[-1]) + array.size > _PART:
            parts.append([])
        parts[-1].append((name, array))

    summed = {}
    for part in filter(None, parts):
        flat = mx.concatenate([(a / scale).astype(dtype).reshape(-1) for _, a in part])
        total = ranks.sum(flat)
        mx.async_eval(total)
        start = 0
        for name, array in part:
            values = total[start : start + array.size].reshape(array.shape).astype(array.dtype)
            summed[name] = values * scale
            start += array.size

    return tree_unflatten([(name, summed[name]) for name, _ in named]), count
