"""Fixed-shape batches of tokens, in the order of a sampler.

A row of a batch is an example; packed, it contains as many examples as fit, one after the other:
its *segments*. The arrays of B rows of T inputs, with room for M targets:

    tokens     int32 [B, T]
    positions  int32 [M], which of the B x T inputs predicts each target
    targets    int32 [M]
    owners     int32 [M], which of the batch's examples a target is of, -1 where it is padding
    segments   int32 [B, T], number of the segment in its packed row, from 0 and rising; what is
               left of a row is a segment of its own. Aligned batches have the inputs of each
               segment as their layout instead.
"""

import dataclasses
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .. import runtime
from ..ops.span_attention import Spans
from .dataset import Batch, Dataset, by_length, edges_of
from .encoding import Example, Examples
from .sampler import Order, Packed, Sampler
from .shapes import (
    Shape,
    fitting_shape,
    joined_shapes,
    padded_length,
    padded_suffix,
    padded_targets,
    sequence_inputs,
)

PADDING = {"positions": 0, "targets": 0, "owners": -1}  # of what each target has
# What batches may be: shapes, or of aligned ones the targets that they have room for by spans.
Allowed = Collection[Shape] | Mapping[Spans, int]


@dataclass(frozen=True)
class TokenCollate:
    """Lays out an example in each row, or several of a `Packed` order; missing rows are empty.

    A row whose index is -1 is empty, too. Aligned batches have no missing rows.
    """

    batch_size: int  # rows
    limit: int  # most inputs of a row; a packed row has as many
    allowed: Allowed | None = None  # None allows any
    prefix: int = 0  # inputs that all rows begin with, after which they are padded

    def __call__(self, examples: Sequence[Example], order: Order) -> Batch:
        if isinstance(order, Packed):
            return self._packed(examples, order)

        rows = [row for row, i in enumerate(order) if i >= 0]
        indices = [order[row] for row in rows]
        chosen = [examples[i] for i in indices]
        longest = max(len(e.tokens) for e in chosen) - 1
        targets = sum(int(e.target.sum()) for e in chosen)
        width, slots = self.shape_of(longest, targets)

        starts = [row * width for row in rows]
        batch = _laid_out(chosen, starts, (self.batch_size, width), slots)
        return dataclasses.replace(batch, examples=_numbers(indices), source=examples)

    def shapes(self, examples: Examples, orders: Iterator[Order]) -> set[Shape]:
        return {self.shape(examples, order) for order in orders}

    def split(self, batch: Batch, parts: int) -> list[Batch]:
        return split_rows(batch, parts)

    def shape(self, examples: Examples, order: Order) -> Shape:
        """Return (T, M) of a batch without laying it out."""
        if isinstance(order, Packed):
            targets = int(examples.target_counts[order.examples].sum())
            return self.limit, self._packed_slots(order, targets)

        order = np.asarray(order)
        order = order[order >= 0]
        longest = int(examples.lengths[order].max()) - 1
        return self.shape_of(longest, int(examples.target_counts[order].sum()))

    def largest(self, lengths: np.ndarray) -> Shape:
        """Return (T, M) that holds any batch of examples of such lengths."""
        width, _ = self.shape_of(int(lengths.max()) - 1, 0)
        slots = self.batch_size * width
        return width, padded_targets(slots, slots)

    def shape_of(self, longest: int, targets: int) -> Shape:
        """Return (T, M) of a batch whose longest row has ``longest`` inputs."""
        if self.prefix:
            suffix = max(longest - self.prefix, 1)
            limit = self.limit - self.prefix
            width = self.prefix + padded_suffix(suffix, limit, self.batch_size)
        else:
            width = padded_length(longest, self.limit)

        slots = padded_targets(targets, self.batch_size * width)
        return fitting_shape((width, slots), self.batch_size, self.allowed)

    def _packed(self, examples: Sequence[Example], order: Packed) -> Batch:
        rows = self._rows(order)
        segments = np.zeros((rows, self.limit), dtype=np.int32)
        chosen = []
        starts = []
        for row, indices in enumerate(order.sequences):
            at = 0
            for number, i in enumerate(indices):
                chosen.append(examples[i])
                starts.append(row * self.limit + at)
                room = order.spans[row][number] if order.spans else len(chosen[-1].tokens) - 1
                at += room
                segments[row, at:] = number + 1

        slots = self._packed_slots(order, sum(int(e.target.sum()) for e in chosen))
        batch = _laid_out(chosen, starts, (rows, self.limit), slots)
        batch = dataclasses.replace(batch, examples=_numbers(order.examples), source=examples)
        if order.spans:
            return dataclasses.replace(batch, layout=order.spans)
        return batch.having(segments=segments)

    def _rows(self, order: Packed) -> int:
        return len(order.sequences) if order.spans else self.batch_size

    def _packed_slots(self, order: Packed, targets: int) -> int:
        if order.spans and self.allowed:
            targets = max(targets, self.allowed[order.spans])
        return padded_targets(targets, self._rows(order) * self.limit)


def _laid_out(
    chosen: list[Example], starts: list[int], shape: tuple[int, int], slots: int
) -> Batch:
    """Lay out each example's inputs at its start, with room for ``slots`` targets."""
    tokens = np.zeros(shape[0] * shape[1], dtype=np.int32)
    positions = []
    targets = []
    owners = []

    for owner, (example, start) in enumerate(zip(chosen, starts, strict=True)):
        tokens[start : start + len(example.tokens) - 1] = example.tokens[:-1]
        at = np.flatnonzero(example.target)
        positions.append(start + at - 1)
        targets.append(example.tokens[at])
        owners.append(np.full(len(at), owner, dtype=np.int32))

    count = sum(map(len, targets))
    parts = {"positions": positions, "targets": targets, "owners": owners}
    of_targets = {name: padded(np.concatenate(part), name, slots) for name, part in parts.items()}
    return Batch(
        inputs={"tokens": tokens.reshape(shape), **of_targets},
        targets=count,
        denominator=count,
        starts=tuple(starts),
        computed=sum(len(example.tokens) - 1 for example in chosen),
    )


def _numbers(order: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(i) for i in order)


def padded(values: np.ndarray, name: str, slots: int) -> np.ndarray:
    """Return what each target has, such as its position, with ``slots`` of them."""
    padding = (0, slots - len(values))
    return np.pad(values, padding, constant_values=PADDING[name]).astype(np.int32)


def split_rows(batch: Batch, parts: int, together: int = 1) -> list[Batch]:
    """Return at most ``parts`` batches of whole rows, of which ``together`` stay in one."""
    rows = len(batch.inputs["tokens"]) // together
    edges = edges_of(rows, parts)
    return [_rows_of(batch, start * together, stop * together) for start, stop in edges]


def _rows_of(batch: Batch, start: int, stop: int) -> Batch:
    inputs = batch.inputs
    width = inputs["tokens"].shape[1]
    rows = inputs["positions"][: batch.targets] // width  # targets come before padding
    inside = np.flatnonzero((rows >= start) & (rows < stop))
    chosen = [i for i, at in enumerate(batch.starts) if start <= at // width < stop]
    first = chosen[0] if chosen else 0
    slots = padded_targets(len(inside), (stop - start) * width)

    of_targets = {
        "positions": inputs["positions"][inside] - start * width,
        "targets": inputs["targets"][inside],
        "owners": inputs["owners"][inside] - first,
    }
    pieces = {name: values[start:stop] for name, values in inputs.items()}  # in their order
    pieces |= {name: padded(values, name, slots) for name, values in of_targets.items()}
    return dataclasses.replace(
        batch,
        inputs=pieces,
        targets=len(inside),
        denominator=len(inside),
        examples=tuple(batch.examples[i] for i in chosen),
        layout=batch.layout[start:stop],
        starts=tuple(batch.starts[i] - start * width for i in chosen),
    )


def token_collate(sampler: Sampler, allowed: Allowed | None = None) -> TokenCollate:
    return TokenCollate(sampler.batch_size, sampler.inputs, allowed)


def training_set(examples: Examples, sampler: Sampler) -> Dataset:
    """Return the batches of a sampler, in few shapes if each costs a compilation."""
    return Dataset(examples, token_collate(sampler, allowed_shapes(examples, sampler)), sampler)


def allowed_shapes(examples: Examples, sampler: Sampler) -> Allowed | None:
    """Return the shapes of batches if steps are compiled; None allows any."""
    if not runtime.COMPILES or (sampler.packing and not sampler.aligned):
        return None
    if sampler.aligned:
        return most_targets(examples, sampler)
    return few_shapes(examples, sampler)


def most_targets(examples: Examples, sampler: Sampler) -> dict[Spans, int]:
    """Return the most targets of a batch with the same spans, in the first epoch."""
    most: dict[Spans, int] = {}
    for batch in sampler.epoch(0):
        targets = int(examples.target_counts[batch.examples].sum())
        most[batch.spans] = max(targets, most.get(batch.spans, 0))
    return most


def few_shapes(examples: Examples, sampler: Sampler, prefix: int = 0) -> frozenset[Shape]:
    """Return at most `MOST_SHAPES` shapes, one of which holds any batch of unpacked examples.

    Rows are padded after ``prefix`` inputs. The shapes do not depend on the number of batches, so
    that a run resumed for more has the same ones.
    """
    draw = sampler.draw
    first = 0 if draw.replay else draw.first
    lengths = examples.lengths[first : draw.stop]
    collate = TokenCollate(sampler.batch_size, sampler.inputs, prefix=prefix)
    orders = itertools.islice(sampler.batches(), -(-len(lengths) // sampler.batch_size))
    shapes = (collate.shape(examples, order) for order in orders)
    return joined_shapes(shapes, collate.largest(lengths), sampler.batch_size)


def evaluation_set(
    examples: Examples, batch_size: int, max_seq_length: int, chosen: np.ndarray, few: bool = False
) -> Dataset:
    """Return the chosen examples once, by length; ``few`` gives at most `MOST_SHAPES` shapes."""
    inputs = sequence_inputs(max_seq_length)
    sampler = Sampler(examples.lengths, batch_size, inputs)
    allowed = few_shapes(examples, sampler) if few else None
    collate = TokenCollate(batch_size, inputs, allowed)
    return Dataset(examples, collate, by_length(examples.lengths, batch_size, chosen))


def evaluation_batches(examples: Examples, batch_size: int, max_seq_length: int) -> list[Batch]:
    chosen = np.arange(len(examples))
    return evaluation_set(examples, batch_size, max_seq_length, chosen).once()
