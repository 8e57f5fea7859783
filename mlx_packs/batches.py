"""Fixed-shape batches of encoded rows, in an order that depends on the seed alone."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .encoding import Example, Examples


@dataclass(frozen=True)
class Batch:
    """A fixed-shape batch of B rows of T inputs and M target slots.

    tokens: int32 [B, T].   positions: int32 [M], index into the B x T flattened inputs whose
    hidden state predicts the target.   targets: int32 [M].   weights: float32 [M], 0 where padding.
    owners: int32 [M], row of the batch (-1 where padding).   count: number of real targets.
    """

    tokens: np.ndarray
    positions: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    owners: np.ndarray
    rows: tuple[int, ...]
    count: int


def padded_length(longest: int, limit: int) -> int:
    """T for a batch: the next of 32, 64, 96, 128, 192, 256, 384, 512, 768, ... (few shapes)."""
    step = 32
    while longest > 4 * step:
        step *= 2
    return min(-(-longest // step) * step, max(limit, 1))


def padded_targets(count: int, slots: int) -> int:
    """M for a batch: a quarter, half, three quarters or all of the B x T positions."""
    for share in (0.25, 0.5, 0.75):
        if count <= int(slots * share):
            return int(slots * share)
    return slots


def make_batch(examples: list[Example], indices, batch_size: int, limit: int) -> Batch:
    """Lay rows out as a batch; missing rows of the last batch are empty."""
    chosen = [examples[i] for i in indices]
    longest = max(len(e.tokens) for e in chosen) - 1
    width = padded_length(max(longest, 1), limit)
    tokens = np.zeros((batch_size, width), dtype=np.int32)
    positions, targets, owners = [], [], []
    for b, e in enumerate(chosen):
        tokens[b, : len(e.tokens) - 1] = e.tokens[:-1]
        at = np.flatnonzero(e.target)
        positions.append(b * width + at - 1)
        targets.append(e.tokens[at])
        owners.append(np.full(len(at), b, dtype=np.int32))
    count = sum(len(t) for t in targets)
    slots = padded_targets(count, batch_size * width)

    def filled(parts: list[np.ndarray], value: int) -> np.ndarray:
        out = np.full(slots, value, dtype=np.int32)
        out[:count] = np.concatenate(parts)
        return out

    weights = np.zeros(slots, dtype=np.float32)
    weights[:count] = 1
    return Batch(
        tokens,
        filled(positions, 0),
        filled(targets, 0),
        weights,
        filled(owners, -1),
        tuple(int(i) for i in indices),
        count,
    )


def epoch_order(lengths: np.ndarray, batch_size: int, seed: int, epoch: int) -> list[np.ndarray]:
    """Rows of each batch of an epoch: shuffled, rows of like length together.

    A function of its arguments alone, so that a resumed run continues where it stopped.
    """
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(len(lengths))
    window = batch_size * 32
    batches = []
    for start in range(0, len(order), window):
        part = order[start : start + window]
        part = part[np.argsort(lengths[part], kind="stable")]
        batches += [part[i : i + batch_size] for i in range(0, len(part), batch_size)]
    return [batches[i] for i in random.permutation(len(batches))]


def training_batches(
    examples: Examples, batch_size: int, max_seq_length: int, seed: int, start: int = 0
) -> Iterator[Batch]:
    """Batches without end, epoch after epoch, from batch number ``start``."""
    lengths = np.array([len(e.tokens) for e in examples.items])
    per_epoch = len(epoch_order(lengths, batch_size, seed, 0))
    epoch, skip = divmod(start, per_epoch)
    while True:
        for indices in epoch_order(lengths, batch_size, seed, epoch)[skip:]:
            yield make_batch(examples.items, indices, batch_size, max_seq_length - 1)
        epoch, skip = epoch + 1, 0


def batch_shapes(
    examples: Examples, batch_size: int, max_seq_length: int, seed: int, iters: int
) -> set[tuple[int, int]]:
    """(T, M) of the first ``iters`` batches of training, without laying them out."""
    lengths = np.array([len(e.tokens) for e in examples.items])
    counts = np.array([int(e.target.sum()) for e in examples.items])
    shapes: set[tuple[int, int]] = set()
    epoch = done = 0
    while done < iters:
        order = epoch_order(lengths, batch_size, seed, epoch)[: iters - done]
        for indices in order:
            width = padded_length(max(int(lengths[indices].max()) - 1, 1), max_seq_length - 1)
            slots = padded_targets(int(counts[indices].sum()), batch_size * width)
            shapes.add((width, slots))
        epoch, done = epoch + 1, done + len(order)
    return shapes


def evaluation_batches(
    examples: Examples, batch_size: int, max_seq_length: int, limit: int = -1
) -> list[Batch]:
    """Every row once, by length; ``limit`` takes the first so many batches' worth of rows."""
    count = len(examples) if limit < 0 else min(len(examples), limit * batch_size)
    order = sorted(range(count), key=lambda i: len(examples.items[i].tokens))
    return [
        make_batch(examples.items, order[i : i + batch_size], batch_size, max_seq_length - 1)
        for i in range(0, count, batch_size)
    ]
