"""Batches of preferences: both examples of a row are in the same batch."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .. import runtime
from .batches import Allowed, Batch, evaluation_orders, few_shapes, lay_out
from .micro_batches import sequences_of
from .packing import Packed
from .preferences import PreferenceExamples
from .sampler import Draw, Order, Sampler

_PAIR_STEP = 8  # of packed rows the arrays are padded to a multiple of it


@dataclass(frozen=True)
class PreferenceBatch:
    """A batch of P rows, whose examples are those of ``tokens``: 2 p and 2 p + 1 are of row p."""

    tokens: Batch
    rows: tuple[int, ...]  # indices of the rows
    labels: np.ndarray  # float32 [slots], 1 where the first example is desirable
    split: str  # that the rows are of, with the phase where there are several

    @property
    def count(self) -> int:
        """Number of target tokens."""
        return self.tokens.count

    @property
    def terms(self) -> int:
        """Number of rows, over which the loss is a mean."""
        return len(self.rows)


def of_rows(order: Order) -> Order:
    """Return the examples of some rows, in the order of the rows."""
    if isinstance(order, Packed):
        return Packed([of_rows(rows) for rows in order.sequences])
    return np.stack([2 * order, 2 * order + 1], axis=1).reshape(-1)


@dataclass(frozen=True)
class PreferenceSampler(Sampler):
    """The examples of each batch; the fields are in examples and sequences, two of a row.

    With `packing` a row is packed as a whole, so that a sequence holds both of its examples.
    """

    def batches(self, start: int = 0) -> Iterator[Order]:
        """Yield the examples of each batch without end, from batch number ``start``."""
        return (of_rows(order) for order in self._of_rows().batches(start))

    def epoch(self, number: int) -> Sequence[Order]:
        """Return the examples of each batch of an epoch, each once."""
        return [of_rows(order) for order in self._of_rows().epoch(number)]

    def _of_rows(self) -> Sampler:
        """Return the sampler of rows."""
        pairs, draw = self.lengths.reshape(-1, 2), self.draw
        # of a packed sequence an example takes one input less than it has tokens
        lengths = pairs.sum(axis=1) - 1 if self.packing else pairs.max(axis=1)
        stop = None if draw.stop is None else draw.stop // 2
        size = self.batch_size if self.packing else self.batch_size // 2
        rows = Draw(draw.first // 2, stop, draw.replay)
        return Sampler(lengths, size, self.inputs, self.seed, self.packing, rows)


def preference_batch(
    examples: PreferenceExamples,
    sampler: PreferenceSampler,
    order: Order,
    split: str,
    allowed: Allowed | None = None,
) -> PreferenceBatch:
    """Lay out the examples of an order of the sampler."""
    tokens = lay_out(examples, sampler, order, allowed)
    rows = tuple(i // 2 for i in tokens.examples[::2])
    slots = sampler.batch_size // 2
    if sampler.packing:
        slots = -(-len(rows) // _PAIR_STEP) * _PAIR_STEP
    labels = np.zeros(slots, np.float32)
    labels[: len(rows)] = examples.labels[list(rows)]
    return PreferenceBatch(tokens, rows, labels, split)


def preference_evaluation(
    examples: PreferenceExamples,
    batch_size: int,
    inputs: int,
    split: str,
    most: int = -1,
    chosen: np.ndarray | None = None,
) -> list[PreferenceBatch]:
    """Return every row once, by length.

    ``most`` batches of the first rows at most, -1 all; or the rows with the ``chosen`` indices.
    """
    sampler = PreferenceSampler(examples.lengths, 2 * batch_size, inputs)
    shapes = few_shapes(examples, sampler) if runtime.COMPILES else None
    longest = examples.lengths.reshape(-1, 2).max(axis=1)
    return [
        preference_batch(examples, sampler, of_rows(order), split, shapes)
        for order in evaluation_orders(longest, batch_size, most, chosen)
    ]


def shared_rows(batch: PreferenceBatch, size: int) -> list[PreferenceBatch]:
    """Return the rows of a batch that each of ``size`` ranks takes, with as many slots each."""
    sequences, width = batch.tokens.tokens.shape
    pieces = [
        sequences_of(batch.tokens, sequences * r // size, sequences * (r + 1) // size, width)
        for r in range(size)
    ]
    slots = sequences // size // 2
    if batch.tokens.segments is not None:
        most = max(len(piece.examples) // 2 for piece in pieces)
        slots = max(-(-most // _PAIR_STEP), 1) * _PAIR_STEP
    return [_with_slots(batch, piece, slots) for piece in pieces]


def _with_slots(batch: PreferenceBatch, piece: Batch, slots: int) -> PreferenceBatch:
    """Return a piece of a batch as rows, given its sequences."""
    rows = tuple(i // 2 for i in piece.examples[::2])
    labels = np.zeros(slots, np.float32)
    if rows:
        first = batch.rows.index(rows[0])
        labels[: len(rows)] = batch.labels[first : first + len(rows)]
    return dataclasses.replace(batch, tokens=piece, rows=rows, labels=labels)


def split_rows(batch: PreferenceBatch, parts: int) -> Sequence[PreferenceBatch]:
    """Return the rows of a batch as at most ``parts`` batches, none of padding alone."""
    sequences, width = batch.tokens.tokens.shape
    step = 1 if batch.tokens.segments is not None else 2  # sequences that stay together
    edges = np.linspace(0, sequences // step, min(parts, sequences // step) + 1).round().astype(int)
    pieces = []
    for start, stop in zip(edges * step, edges[1:] * step, strict=False):
        piece = sequences_of(batch.tokens, int(start), int(stop), width)
        if not piece.count:
            continue
        rows = len(piece.examples) // 2
        slots = (stop - start) // 2 if step == 2 else -(-rows // _PAIR_STEP) * _PAIR_STEP
        pieces.append(_with_slots(batch, piece, slots))
    return pieces
