"""Fixed-shape batches of examples, in the order of a sampler.

Unpacked, a sequence of a batch is an example. Packed, it contains as many examples as fit, one after
the other: its *segments*.
"""

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..ops.span_attention import Spans
from .encoding import Example, Examples
from .packing import Packed
from .sampler import Order, Sampler
from .shapes import (
    Shape,
    fitting_shape,
    joined_shapes,
    padded_length,
    padded_targets,
    sequence_inputs,
)

_COUNTED_BATCHES = 2000
# What batches may be: shapes, or of aligned ones the targets that they have room for by spans.
Allowed = Collection[Shape] | Mapping[Spans, int]


@dataclass(frozen=True)
class Batch:
    """A fixed-shape batch of B sequences of T inputs and M target slots."""

    tokens: np.ndarray  # int32 [B, T]
    positions: np.ndarray  # int32 [M], which of the B x T inputs predicts the target
    targets: np.ndarray  # int32 [M]
    weights: np.ndarray  # float32 [M], 0 where padding
    owners: np.ndarray  # int32 [M], index into `examples`, -1 where padding
    examples: tuple[int, ...]  # indices of the examples, in their order in the batch
    starts: tuple[int, ...]  # where the inputs of each begin among the B x T
    count: int  # real targets
    # int32 [B, T], number of the segment in its sequence, from 0 and rising; what is left of a
    # sequence is a segment of its own. Or the inputs of each, where other batches have the same.
    # None where a sequence is one example.
    segments: np.ndarray | Spans | None = None
    # uint8 [B, T, bytes], what enters the first adapted block (frozen_activations.py), or None
    states: np.ndarray | None = None
    inputs: int = 0  # real inputs, without padding

    @property
    def terms(self) -> int:
        """Number of targets, over which the loss is a mean."""
        return self.count


def make_batch(
    examples: Sequence[Example],
    indices: Sequence[int],
    batch_size: int,
    limit: int,
    shapes: Collection[Shape] | None = None,
) -> Batch:
    """Lay out the examples of these indices as a batch, missing ones as empty sequences.

    A sequence has ``limit`` inputs at most; ``shapes`` None allows any.
    """
    batch = [examples[i] for i in indices]
    longest = max(len(e.tokens) for e in batch) - 1
    width = padded_length(max(longest, 1), limit)
    slots = padded_targets(sum(int(e.target.sum()) for e in batch), batch_size * width)
    width, slots = fitting_shape((width, slots), batch_size, shapes)
    starts = [b * width for b in range(len(batch))]
    return _laid_out(batch, starts, (batch_size, width), slots, indices)


def make_packed_batch(
    examples: Sequence[Example],
    packed: Packed,
    batch_size: int,
    limit: int,
    most_targets: Mapping[Spans, int] | None = None,
) -> Batch:
    """Lay out packed sequences of ``limit`` inputs.

    Aligned ones are as many as there are, and have room for ``most_targets`` of their spans; of
    others missing ones are empty sequences.
    """
    if packed.spans is not None:
        batch_size = len(packed.sequences)
    segments = np.zeros((batch_size, limit), dtype=np.int32)
    chosen, starts = [], []
    for b, indices in enumerate(packed.sequences):
        at = 0
        for number, i in enumerate(indices):
            chosen.append(examples[i])
            starts.append(b * limit + at)
            at += packed.spans[b][number] if packed.spans else len(chosen[-1].tokens) - 1
            segments[b, at:] = number + 1
    count = sum(int(e.target.sum()) for e in chosen)
    if most_targets:
        count = max(count, most_targets[packed.spans])
    slots = padded_targets(count, batch_size * limit)
    segments = packed.spans or segments
    return _laid_out(chosen, starts, (batch_size, limit), slots, packed.examples, segments)


def _laid_out(
    chosen: list[Example],
    starts: list[int],
    shape: tuple[int, int],
    slots: int,
    indices: Sequence[int],
    segments: np.ndarray | Spans | None = None,
) -> Batch:
    """Return a batch with each example's inputs at its start, and room for ``slots`` targets."""
    tokens = np.zeros(shape[0] * shape[1], dtype=np.int32)
    positions, targets, owners = [], [], []
    for owner, (e, start) in enumerate(zip(chosen, starts, strict=True)):
        tokens[start : start + len(e.tokens) - 1] = e.tokens[:-1]
        at = np.flatnonzero(e.target)
        positions.append(start + at - 1)
        targets.append(e.tokens[at])
        owners.append(np.full(len(at), owner, dtype=np.int32))
    count = sum(len(t) for t in targets)

    def filled(parts: list[np.ndarray], value: int) -> np.ndarray:
        padded = np.pad(np.concatenate(parts), (0, slots - count), constant_values=value)
        return padded.astype(np.int32)

    return Batch(
        tokens.reshape(shape),
        filled(positions, 0),
        filled(targets, 0),
        (np.arange(slots) < count).astype(np.float32),
        filled(owners, -1),
        tuple(int(i) for i in indices),
        tuple(starts),
        count,
        segments,
        inputs=sum(len(e.tokens) - 1 for e in chosen),
    )


def lay_out(
    examples: Examples, sampler: Sampler, order: Order, allowed: Allowed | None = None
) -> Batch:
    """Return the batch of one of the sampler's orders; its shape is an allowed one."""
    if isinstance(order, Packed):
        return make_packed_batch(examples.items, order, sampler.batch_size, sampler.inputs, allowed)
    return make_batch(examples.items, order, sampler.batch_size, sampler.inputs, allowed)


def training_batches(
    examples: Examples, sampler: Sampler, start: int = 0, allowed: Allowed | None = None
) -> Iterator[Batch]:
    """Yield the sampler's batches without end, from batch number ``start``."""
    return (lay_out(examples, sampler, order, allowed) for order in sampler.batches(start))


def batch_shapes(
    examples: Examples, sampler: Sampler, count: int, allowed: Allowed | None = None
) -> set[Shape]:
    """Return the shapes of the first ``count`` batches of `training_batches`, without laying them out."""
    return set(_shape_counts(examples, sampler, count, allowed))


def _shape_counts(
    examples: Examples, sampler: Sampler, count: int, allowed: Allowed | None = None
) -> Counter[Shape]:
    """Return how many of the first ``count`` batches have each shape."""
    shapes: Counter[Shape] = Counter()
    size = sampler.batch_size
    for order in itertools.islice(sampler.batches(), count):
        if isinstance(order, Packed):
            targets = int(examples.target_counts[order.examples].sum())
            if order.spans:
                targets = max(targets, allowed[order.spans] if allowed else 0)
                size = len(order.spans)
            shapes[sampler.inputs, padded_targets(targets, size * sampler.inputs)] += 1
            continue
        width = padded_length(max(int(examples.lengths[order].max()) - 1, 1), sampler.inputs)
        targets = int(examples.target_counts[order].sum())
        shape = width, padded_targets(targets, size * width)
        shapes[fitting_shape(shape, size, allowed)] += 1
    return shapes


def most_targets(examples: Examples, sampler: Sampler) -> dict[Spans, int]:
    """Return the most targets of a batch of the first epoch that has such spans."""
    most: dict[Spans, int] = {}
    for batch in sampler.epoch(0):
        targets = int(examples.target_counts[batch.examples].sum())
        most[batch.spans] = max(targets, most.get(batch.spans, 0))
    return most


def few_shapes(examples: Examples, sampler: Sampler) -> frozenset[Shape]:
    """Return at most `MOST_SHAPES` shapes, one of which holds any batch of unpacked examples.

    It begins with those of the first batches and joins the two that add the least padding. It does
    not depend on the number of batches, so that a run resumed for more has the same ones.
    """
    draw, batch_size = sampler.draw, sampler.batch_size
    lengths = examples.lengths[0 if draw.replay else draw.first : draw.stop]
    batches = min(-(-len(lengths) // batch_size), _COUNTED_BATCHES)
    counts = _shape_counts(examples, sampler, batches)
    longest = padded_length(int(lengths.max()) - 1, sampler.inputs)
    counts[longest, batch_size * longest] += 0  # a later epoch may put any examples together

    return joined_shapes(counts, batch_size)


def evaluation_batches(
    examples: Examples,
    batch_size: int,
    max_seq_length: int,
    max_batches: int = -1,
    few: bool = False,
    chosen: np.ndarray | None = None,
) -> list[Batch]:
    """Return every example once, by length.

    ``max_batches`` takes the first examples that fill N batches, -1 all of them; ``chosen`` takes
    the examples with these indices instead. With ``few`` the batches have at most `MOST_SHAPES`
    shapes, since each costs a compilation.
    """
    sampler = Sampler(examples.lengths, batch_size, sequence_inputs(max_seq_length))
    shapes = few_shapes(examples, sampler) if few else None
    orders = evaluation_orders(examples.lengths, batch_size, max_batches, chosen)
    return [lay_out(examples, sampler, indices, shapes) for indices in orders]


def evaluation_orders(
    lengths: np.ndarray, batch_size: int, most: int = -1, chosen: np.ndarray | None = None
) -> Iterator[np.ndarray]:
    """Yield the chosen examples by length in batches; without them the first ``most`` batches."""
    if chosen is None:
        chosen = np.arange(len(lengths) if most < 0 else min(len(lengths), most * batch_size))
    chosen = np.sort(chosen)
    order = chosen[np.argsort(np.asarray(lengths)[chosen], kind="stable")]
    return (order[i : i + batch_size] for i in range(0, len(order), batch_size))
