"""Which rows of the data each batch holds: an order that depends on the seed alone."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .encoding import Examples

_WINDOW = 32  # batches among which rows of like length are put together
# Packed rows that a window of shuffled rows fills; its last one is half full on average.
_PACKED_WINDOW = 128


@dataclass(frozen=True)
class Draw:
    """Which rows batches are drawn from: rows [first, stop), the own ones; and of the rows of all
    batches the share ``replay`` from [0, first), what was learned before. stop: None is the end.

    The first N rows of batches have N x replay of those, rounded, whatever N is.
    """

    first: int = 0
    stop: int | None = None
    replay: float = 0.0

    def replayed(self, rows: int) -> int:
        """How many of the first ``rows`` rows of batches are not own ones."""
        return math.floor(rows * self.replay + 0.5)


ALL = Draw()


def epoch_order(lengths: np.ndarray, batch_size: int, seed: int, epoch: int) -> list[np.ndarray]:
    """Rows of each batch of an epoch: shuffled, rows of like length together.

    A function of its arguments alone, so that a resumed run continues where it stopped.
    """
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(len(lengths))
    window = batch_size * _WINDOW
    batches = []
    for start in range(0, len(order), window):
        part = order[start : start + window]
        part = part[np.argsort(lengths[part], kind="stable")]
        batches += [part[i : i + batch_size] for i in range(0, len(part), batch_size)]
    return [batches[i] for i in random.permutation(len(batches))]


def packed_order(
    lengths: np.ndarray, batch_size: int, limit: int, seed: int, epoch: int
) -> list[list[np.ndarray]]:
    """Packed rows of each batch of an epoch, each given by its rows.

    The rows are shuffled and packed a window at a time, so that a packed row holds rows of any
    length and of any place; then the packed rows are shuffled. A function of its arguments alone.
    """
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(len(lengths))
    inputs = lengths - 1
    windows = max(1, round(int(inputs.sum()) / (limit * _PACKED_WINDOW)))
    packed = [p for part in np.array_split(order, windows) for p in first_fit(inputs, part, limit)]
    packed = [packed[i] for i in random.permutation(len(packed))]
    return [packed[i : i + batch_size] for i in range(0, len(packed), batch_size)]


def first_fit(inputs: np.ndarray, rows: np.ndarray, limit: int) -> list[np.ndarray]:
    """Rows put into packed rows of ``limit`` inputs: the longest first, each where it first fits.

    Every row has at most ``limit`` inputs.
    """
    rows = rows[np.argsort(-inputs[rows], kind="stable")]
    free = np.full(len(rows), limit)
    held: list[list[int]] = []
    for row in rows:
        at = int(np.argmax(free[: len(held) + 1] >= inputs[row]))  # the last of these is empty
        if at == len(held):
            held.append([])
        held[at].append(row)
        free[at] -= inputs[row]
    return [np.array(indices) for indices in held]


def orders(
    lengths: np.ndarray,
    batch_size: int,
    limit: int,
    seed: int,
    packing: bool,
    start: int = 0,
    draw: Draw = ALL,
) -> Iterator[np.ndarray | list[np.ndarray]]:
    """Rows (packed: packed rows) of each batch, epoch after epoch, from batch number ``start``."""
    if draw.replay:
        mixed = _mixed_orders(lengths, batch_size, limit, seed, packing, draw)
        yield from itertools.islice(mixed, start, None)
    own = lengths[draw.first : draw.stop]
    for epoch in itertools.count():
        order = (
            packed_order(own, batch_size, limit, seed, epoch)
            if packing
            else epoch_order(own, batch_size, seed, epoch)
        )
        for rows in order[start:]:
            yield [r + draw.first for r in rows] if packing else rows + draw.first
        start = max(0, start - len(order))


def _mixed_orders(
    lengths: np.ndarray, batch_size: int, limit: int, seed: int, packing: bool, draw: Draw
) -> Iterator[np.ndarray | list[np.ndarray]]:
    """Batches without end of own and replayed rows, each full; each kind goes on epoch by epoch.

    Packed, a packed row has rows of one kind, and what is counted are packed rows.
    """

    def one_by_one(which: Draw, kind: int) -> Iterator:
        if packing:
            batches = orders(lengths, batch_size, limit, seed + kind, True, draw=which)
            yield from itertools.chain.from_iterable(batches)
        rows = np.arange(len(lengths))[which.first : which.stop]
        for epoch in itertools.count():
            yield from np.random.default_rng([seed, kind, epoch]).permutation(rows)

    own = one_by_one(Draw(draw.first, draw.stop), 0)
    replayed = one_by_one(Draw(0, draw.first), 1)
    for window in itertools.count():
        batches = range(window * _WINDOW, (window + 1) * _WINDOW)
        edges = [draw.replayed(batch * batch_size) for batch in (*batches, batches.stop)]
        shares = np.diff(edges)  # replayed rows of each batch
        old = list(itertools.islice(replayed, int(shares.sum())))
        new = list(itertools.islice(own, _WINDOW * batch_size - len(old)))
        order = range(len(shares))
        if not packing:
            old.sort(key=lengths.__getitem__)
            new.sort(key=lengths.__getitem__)
            order = np.random.default_rng([seed, 2, window]).permutation(len(shares))
        made: list = [None] * len(shares)
        kinds = iter(old), iter(new)
        for i in order:
            counts = int(shares[i]), batch_size - int(shares[i])
            parts = (itertools.islice(kind, n) for kind, n in zip(kinds, counts, strict=True))
            made[i] = list(itertools.chain.from_iterable(parts))
        yield from (rows if packing else np.array(rows) for rows in made)


def packed_rows(
    examples: Examples, batch_size: int, max_seq_length: int, seed: int
) -> tuple[int, float]:
    """How many packed rows the first epoch has, and the share of their inputs that is filled."""
    limit = max_seq_length - 1
    order = packed_order(examples.lengths, batch_size, limit, seed, 0)
    count = sum(len(batch) for batch in order)
    return count, float((examples.lengths - 1).sum()) / (count * limit)
