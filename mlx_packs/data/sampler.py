"""The examples of each batch, in an order that only depends on the seed, and their packing.

On a GPU attention is computed for one packed example after the other, and their places are a part
of the compiled step. So that few steps are compiled, batches share these places: examples of like
length form a *stack*, and each of some batches takes one example of every stack.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .. import runtime
from ..ops.span_attention import Spans
from .shapes import COMPILATION_TOKENS, MOST_SHAPES, TILE

_WINDOW = 32  # batches among which examples of like length are put together
_COMPILED_WINDOW = 256  # where each padded length costs a compilation
# Packed sequences that a window of shuffled examples fills; its last one is half full on average.
_PACKED_WINDOW = 128

_SPAN_TOKENS = 10  # what a segment adds to a compilation, in tokens trained meanwhile
_LAYOUTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, MOST_SHAPES)


class Packed(NamedTuple):
    sequences: list[np.ndarray]  # indices of the examples of each
    spans: Spans | None = None  # None where each example has the room of its own inputs

    @property
    def examples(self) -> np.ndarray:
        return np.concatenate(self.sequences)


def first_fit(inputs: np.ndarray, indices: np.ndarray, limit: int) -> list[np.ndarray]:
    """Pack examples into sequences of ``limit`` inputs: longest first, each where it first fits.

    ``inputs`` has the length of every example, ``indices`` the examples to pack.
    """
    indices = indices[np.argsort(-inputs[indices], kind="stable")]
    free = np.full(len(indices), limit)
    sequences: list[list[int]] = []

    for i in indices:
        at = int(np.argmax(free[: len(sequences) + 1] >= inputs[i]))  # the last one is empty
        if at == len(sequences):
            sequences.append([])
        sequences[at].append(i)
        free[at] -= inputs[i]

    return [np.array(sequence) for sequence in sequences]


def aligned_batches(
    inputs: np.ndarray, batch_size: int, limit: int, random: np.random.Generator
) -> list[Packed]:
    """Pack examples into batches of sequences of ``limit`` inputs, many of which share spans.

    The spans only depend on the lengths ``inputs``; ``random`` decides which examples of a stack
    meet. A batch has at most ``batch_size`` sequences, each covered by its spans.
    """
    ranked = -np.sort(-inputs)
    most = -(-int(inputs.sum()) // (batch_size * limit))  # batches, if none had room left
    compilation = COMPILATION_TOKENS + _SPAN_TOKENS * len(inputs) / most

    def cost(height: int) -> float:
        """Return the cost of an epoch, in inputs."""
        rows = len(_rows(ranked, height, limit))
        return rows * height * limit + -(-rows // batch_size) * compilation

    height = min({-(-most // layouts) for layouts in _LAYOUTS}, key=cost)

    order = random.permutation(len(inputs))
    order = order[np.argsort(-inputs[order], kind="stable")]
    for first in range(0, len(order), height):
        random.shuffle(order[first : first + height])

    return [
        Packed([order[ranks[ranks < len(order)]] for ranks in sequences], spans)
        for sequences, spans in _ranked_batches(ranked, height, batch_size, limit)
    ]


def _rows(inputs: np.ndarray, height: int, limit: int) -> list[np.ndarray]:
    """Return the stacks of each row, as if each stack of ``height`` were its longest example.

    ``inputs`` has the lengths of all examples, the longest first.
    """
    widths = inputs[::height]
    rows = first_fit(widths, np.arange(len(widths)), limit)
    return [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]


def _ranked_batches(
    inputs: np.ndarray, height: int, batch_size: int, limit: int
) -> Iterator[tuple[list[np.ndarray], Spans]]:
    """Yield the sequences of each batch, as ranks of examples, and their spans.

    A sequence has one example of each stack of a row; the last stack may lack it.
    """
    rows = _rows(inputs, height, limit)
    full = len(rows) // batch_size * batch_size
    groups = [rows[first : first + batch_size] for first in range(0, full, batch_size)]
    batches = [[(row, n) for row in group] for group in groups for n in range(height)]

    # rows too few for a batch of their own: each as often as its stacks are high
    rest = [(row, n) for row in rows[full:] for n in range(height)]
    rest = [(row, n) for row, n in rest if row[0] * height + n < len(inputs)]
    batches += [rest[first : first + batch_size] for first in range(0, len(rest), batch_size)]

    for chosen in batches:
        spans = tuple(_spans(inputs[row * height], limit) for row, _ in chosen)
        yield [row * height + n for row, n in chosen], spans


def _spans(widths: np.ndarray, limit: int) -> tuple[int, ...]:
    """Return the segments of a sequence; segments after the last example are as long as it is."""
    spans = widths.tolist()
    more, remainder = divmod(limit - int(widths.sum()), spans[-1])
    spans += more * spans[-1:]
    spans[-1] += remainder
    return tuple(spans)


# The content of one batch: indices of examples [B], or packed sequences of them.
Order = np.ndarray | Packed


@dataclass(frozen=True)
class Draw:
    """The examples that batches are drawn from: [first, stop), the own ones, and replayed ones.

    The share ``replay`` is drawn from [0, first), which was trained on before: round(N x replay)
    of the first N examples, for every N. ``stop`` None is the end.
    """

    first: int = 0
    stop: int | None = None
    replay: float = 0.0

    def replayed(self, examples: int) -> int:
        """Return how many of the first ``examples`` examples of batches are replayed."""
        return math.floor(examples * self.replay + 0.5)


ALL = Draw()


class _Batches(Sequence[np.ndarray]):
    """Slices of an order, of which the last may be shorter; a list of a million takes 100 MB."""

    def __init__(self, order: np.ndarray, size: int, numbers: np.ndarray) -> None:
        self._order = order
        self._size = size
        self._numbers = numbers  # of the slice that each batch is

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, i: int
    ) -> np.ndarray:
        start = int(self._numbers[i]) * self._size
        return self._order[start : start + self._size]


@dataclass(frozen=True)
class Sampler:
    """The examples of each batch of a run, epoch after epoch; it only depends on its fields."""

    lengths: np.ndarray  # tokens of each example, int [N]
    batch_size: int  # examples of a batch; with `packing` packed sequences
    inputs: int  # most of a sequence; of a next-token model one less than its tokens
    seed: int = 0  # of the order
    packing: bool = False  # whether a sequence of a batch contains as many examples as fit
    draw: Draw = ALL  # which of the examples
    aligned: bool = False  # whether packed batches share the places of their examples

    def batches(self, start: int = 0) -> Iterator[Order]:
        """Yield the examples of each batch without end, from batch number ``start``."""
        if self.draw.replay:
            yield from itertools.islice(self._mixed(), start, None)

        first, start = self._cursor(start)
        for number in itertools.count(first):
            epoch = self.epoch(number)
            yield from (epoch[i] for i in range(start, len(epoch)))
            start = max(0, start - len(epoch))

    def _cursor(self, start: int) -> tuple[int, int]:
        """Return an epoch at or before batch number ``start``, and the batch's number from it.

        An epoch must be packed to know how many batches of packed sequences it has.
        """
        if self.packing:
            return 0, start
        count = len(self.lengths[self.draw.first : self.draw.stop])
        return divmod(start, -(-count // self.batch_size))

    def epoch(self, number: int) -> Sequence[Order]:
        """Return the batches of an epoch, with each own example once."""
        random = np.random.default_rng([self.seed, number])
        first = self.draw.first
        lengths = self.lengths[first : self.draw.stop]

        if not self.packing:
            return self._by_length(lengths, random)

        return [
            batch._replace(sequences=[indices + first for indices in batch.sequences])
            for batch in self._packed(lengths, random)
        ]

    def _by_length(self, lengths: np.ndarray, random: np.random.Generator) -> "_Batches":
        """Shuffle, with examples of like length together."""
        size = self.batch_size
        window = size * _WINDOW
        if runtime.COMPILES:  # those that are padded to the same length stay shuffled
            window = size * _COMPILED_WINDOW
            lengths = -(-(lengths - 1) // TILE)
        order = random.permutation(len(lengths))

        for start in range(0, len(order), window):
            part = order[start : start + window]
            order[start : start + window] = part[np.argsort(lengths[part], kind="stable")]

        numbers = random.permutation(-(-len(order) // size))
        return _Batches(order + self.draw.first, size, numbers)

    def _packed(self, lengths: np.ndarray, random: np.random.Generator) -> list[Packed]:
        """Return an epoch of packed sequences.

        Unless they are aligned, shuffled examples are packed a window at a time, so that a
        sequence has examples of any length and place; then the sequences are shuffled.
        """
        inputs = lengths - 1
        if self.aligned:
            batches = aligned_batches(inputs, self.batch_size, self.inputs, random)
            return [batches[i] for i in random.permutation(len(batches))]

        order = random.permutation(len(lengths))
        count = max(1, round(int(inputs.sum()) / (self.inputs * _PACKED_WINDOW)))
        windows = np.array_split(order, count)
        packed = [indices for part in windows for indices in first_fit(inputs, part, self.inputs)]
        packed = [packed[i] for i in random.permutation(len(packed))]

        size = self.batch_size
        return [Packed(packed[i : i + size]) for i in range(0, len(packed), size)]

    def _mixed(self) -> Iterator[Order]:
        """Yield full batches of new and replayed examples; each kind continues epoch by epoch.

        A packed sequence has examples of one kind, and sequences are counted. They are not
        aligned, since a batch may have any of them.
        """
        fresh = self._one_by_one(Draw(self.draw.first, self.draw.stop), 0)
        replayed = self._one_by_one(Draw(0, self.draw.first), 1)

        for window in itertools.count():
            numbers = range(window * _WINDOW, (window + 1) * _WINDOW)
            edges = [self.draw.replayed(n * self.batch_size) for n in (*numbers, numbers.stop)]
            shares = np.diff(edges)  # replayed examples of each batch
            old = list(itertools.islice(replayed, int(shares.sum())))
            new = list(itertools.islice(fresh, _WINDOW * self.batch_size - len(old)))

            order = range(len(shares))
            if not self.packing:
                old.sort(key=self.lengths.__getitem__)
                new.sort(key=self.lengths.__getitem__)
                order = np.random.default_rng([self.seed, 2, window]).permutation(len(shares))

            batches: list = [None] * len(shares)
            next_old = iter(old)
            next_new = iter(new)
            for i in order:
                count = int(shares[i])
                batches[i] = [
                    *itertools.islice(next_old, count),
                    *itertools.islice(next_new, self.batch_size - count),
                ]

            make_order = Packed if self.packing else np.array
            yield from map(make_order, batches)

    def _one_by_one(self, draw: Draw, kind: int) -> Iterator:
        """Yield examples, or packed sequences, of one kind without end."""
        if self.packing:
            sampler = dataclasses.replace(self, seed=self.seed + kind, draw=draw, aligned=False)
            for batch in sampler.batches():
                yield from batch.sequences

        indices = np.arange(len(self.lengths))[draw.first : draw.stop]
        for epoch in itertools.count():
            yield from np.random.default_rng([self.seed, kind, epoch]).permutation(indices)


@dataclass(frozen=True)
class GroupedSampler(Sampler):
    """A sampler of rows of two examples, which stay together in a batch; fields count examples."""

    def batches(self, start: int = 0) -> Iterator[np.ndarray]:
        return (grouped(rows) for rows in self._of_rows().batches(start))

    def epoch(self, number: int) -> Sequence[np.ndarray]:
        return [grouped(rows) for rows in self._of_rows().epoch(number)]

    def _of_rows(self) -> Sampler:
        lengths = self.lengths.reshape(-1, 2).max(axis=1)
        stop = self.draw.stop
        if stop is not None:
            stop //= 2
        draw = Draw(self.draw.first // 2, stop, self.draw.replay)
        return Sampler(lengths, self.batch_size // 2, self.inputs, self.seed, draw=draw)


def grouped(rows: np.ndarray) -> np.ndarray:
    """Return the examples of rows, [N] to [2 N]."""
    return (2 * rows[:, None] + np.arange(2)).reshape(-1)


def packing_fill(sampler: Sampler) -> tuple[int, float]:
    """Return how many sequences the first epoch has, and their share of real inputs."""
    count = sum(len(batch.sequences) for batch in sampler.epoch(0))
    return count, float((sampler.lengths - 1).sum()) / (count * sampler.inputs)
