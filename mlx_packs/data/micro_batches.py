"""Batches in pieces: so that less of one is in memory at a time, or each rank takes its share."""

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from .shapes import padded_targets

if TYPE_CHECKING:
    from .batches import Batch


def split_tokens(batch: "Batch", parts: int) -> "list[Batch]":
    """Return the sequences of a batch as at most ``parts`` batches; those without a target are left out."""
    rows, width = batch.tokens.shape
    edges = edges_of(rows, parts)
    pieces = (sequences_of(batch, start, stop, width) for start, stop in edges)
    return [piece for piece in pieces if piece.count]


def shared_tokens(batch: "Batch", rank: int, size: int) -> "Batch | None":
    """Return the sequences of a batch that one of ``size`` ranks takes; None where there are none."""
    rows, width = batch.tokens.shape
    start, stop = rows * rank // size, rows * (rank + 1) // size
    return sequences_of(batch, start, stop, width) if start < stop else None


def sequences_of(batch: "Batch", start: int, stop: int, width: int) -> "Batch":
    """Return the sequences [start, stop) of a batch."""
    rows = batch.positions[: batch.count] // width  # targets come before padding
    inside = np.flatnonzero((rows >= start) & (rows < stop))
    chosen = [i for i, at in enumerate(batch.starts) if start <= at // width < stop]
    slots = padded_targets(len(inside), (stop - start) * width)

    def filled(values: np.ndarray, value: int) -> np.ndarray:
        padding = (0, slots - len(inside))
        return np.pad(values[inside], padding, constant_values=value).astype(np.int32)

    return dataclasses.replace(
        batch,
        tokens=batch.tokens[start:stop],
        positions=np.maximum(filled(batch.positions, start * width) - start * width, 0),
        targets=filled(batch.targets, 0),
        weights=(np.arange(slots) < len(inside)).astype(np.float32),
        owners=np.maximum(filled(batch.owners, -1) - (chosen[0] if chosen else 0), -1),
        examples=tuple(batch.examples[i] for i in chosen),
        starts=tuple(batch.starts[i] - start * width for i in chosen),
        count=len(inside),
        segments=None if batch.segments is None else batch.segments[start:stop],
        states=None if batch.states is None else batch.states[start:stop],
    )


def edges_of(rows: int, parts: int) -> list[tuple[int, int]]:
    """Return where each of at most ``parts`` pieces of so many rows starts and stops."""
    edges = np.linspace(0, rows, min(parts, rows) + 1).round().astype(int).tolist()
    return list(zip(edges, edges[1:], strict=False))
