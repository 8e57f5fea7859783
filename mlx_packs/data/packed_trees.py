"""Packed trees: packed examples that begin alike, whose common beginning is computed once.

The arrays of a batch of packed rows (batches.py) become

    prefix     int32 [1, P]
    tokens     int32 [1, N], what follows it in each example, one after the other
    positions  int32 [M], which of the P inputs of the prefix, and then of the N others, predicts
               each target

The layout has the inputs of each example among the N: its spans, the longest first. Examples of the
batch are in this order, too.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .. import runtime
from .batches import PackedCollate, allowed_shapes
from .dataset import Batch, Dataset, Tree, edges_of
from .encoding import Examples
from .packing import Packed
from .sampler import Sampler
from .shapes import TILE, Shape, TreeShape, padded_targets
from .trees import TreePlan


def packed_tree(batch: Batch, prefix: int, recurs: bool = False) -> Batch:
    """Return the tree of packed rows, all of whose examples begin with ``prefix`` inputs."""
    rooms = _rooms(batch)
    order = np.argsort(-rooms, kind="stable")
    spans = _tiled(np.maximum(rooms[order] - prefix, 1))
    edges = np.cumsum([0, *spans])

    flat = np.append(batch.inputs["tokens"].reshape(-1), 0)
    starts = np.array(batch.starts)[order]
    tokens = np.zeros(edges[-1], np.int32)
    for start, first, last in zip(starts, edges, edges[1:], strict=False):
        own = flat[start + prefix : start + prefix + last - first]
        tokens[first : first + len(own)] = own

    number = np.argsort(order)  # of each example in its new place
    owners = batch.inputs["owners"]
    is_target = owners >= 0
    owner = number[np.maximum(owners, 0)]
    place = batch.inputs["positions"] - starts[owner]
    moved = np.where(place < prefix, place, edges[owner] + place)

    tree = batch.having(
        prefix=flat[None, starts[0] : starts[0] + prefix],
        tokens=tokens[None],
        positions=np.where(is_target, moved, 0).astype(np.int32),
        owners=np.where(is_target, owner, -1).astype(np.int32),
    )
    tree.inputs.pop("segments", None)
    return dataclasses.replace(
        tree,
        examples=tuple(batch.examples[i] for i in order),
        starts=tuple(edges[:-1].tolist()),
        layout=Tree(1, prefix, recurs, (tuple(spans.tolist()),)),
    )


def _tiled(spans: np.ndarray) -> np.ndarray:
    """Make whole tiles of all spans together if steps are compiled, as on a GPU."""
    if runtime.COMPILES:
        spans[-1] += -int(spans.sum()) % TILE
    return spans


def _rooms(batch: Batch) -> np.ndarray:
    """Return the inputs that each example of a packed batch has room for."""
    if not batch.layout:
        return np.array([len(batch.source[i].tokens) - 1 for i in batch.examples])

    lengths = list(itertools.chain.from_iterable(batch.layout))
    room = dict(zip(itertools.accumulate([0, *lengths]), lengths, strict=False))
    return np.array([room[start] for start in batch.starts])


@dataclass(frozen=True)
class PackedTreeCollate:
    packed: PackedCollate  # lays out the rows
    prefix: int  # inputs that all examples begin with
    recurs: bool = False  # whether other steps of an update have the same prefix
    once: bool = False  # whether the pieces of a batch compute it once

    @property
    def batch_size(self) -> int:
        return self.packed.batch_size

    def __call__(self, examples: Examples, order: Packed) -> Batch:
        return packed_tree(self.packed(examples, order), self.prefix, self.recurs)

    def shapes(self, examples: Examples, orders: Iterator[Packed]) -> set[Shape]:
        return {self._shape(examples, order) for order in orders}

    def split(self, batch: Batch, parts: int) -> list[Batch]:
        """Return pieces of whole examples, with about as many inputs each."""
        (spans,) = batch.layout.spans
        edges = np.cumsum([0, *spans])
        limits = [stop for _, stop in edges_of(int(edges[-1]), parts)]
        stops = np.unique(np.searchsorted(edges, limits))
        return [
            self._piece(batch, int(start), int(stop), edges)
            for start, stop in zip([0, *stops], stops, strict=False)
        ]

    def _piece(self, batch: Batch, start: int, stop: int, edges: np.ndarray) -> Batch:
        inputs = batch.inputs
        spans = _tiled(np.diff(edges[start : stop + 1]))
        width = int(spans.sum())

        tokens = inputs["tokens"][:, edges[start] : edges[stop]]
        owners = inputs["owners"]
        inside = np.flatnonzero((owners >= start) & (owners < stop))
        of_rows = width + (stop - start) * self.prefix
        slots = padded_targets(len(inside), of_rows)

        positions = inputs["positions"][inside]
        of_targets = {
            "positions": positions - np.where(positions < self.prefix, 0, edges[start]),
            "targets": inputs["targets"][inside],
            "owners": owners[inside] - start,
        }
        padding = {"positions": 0, "targets": 0, "owners": -1}
        arrays = {
            name: np.pad(values, (0, slots - len(values)), constant_values=padding[name])
            for name, values in of_targets.items()
        }

        arrays["tokens"] = np.pad(tokens, ((0, 0), (0, width - tokens.shape[1])))
        tree = Tree(1, self.prefix, self.once, (tuple(spans.tolist()),))
        return dataclasses.replace(
            batch.having(**arrays),
            targets=len(inside),
            denominator=len(inside),
            examples=batch.examples[start:stop],
            starts=tuple((edges[start:stop] - edges[start]).tolist()),
            layout=tree,
        )

    def _shape(self, examples: Examples, order: Packed) -> Shape:
        """Rows have no padding, and as many examples each."""
        _, slots = self.packed.shape(examples, order)
        if order.spans:
            own = zip(order.spans, order.sequences, strict=True)
            inputs = sum(sum(spans[: len(indices)]) for spans, indices in own)
        else:
            inputs = int(examples.lengths[order.examples].sum()) - len(order.examples)

        rows = self.batch_size
        of_row = len(order.examples) / rows
        width = math.ceil(inputs / rows)
        return TreeShape(width, slots, self.prefix, examples=of_row, recurs=self.recurs)


def packed_trees(plan: TreePlan, examples: Examples, sampler: Sampler) -> Dataset:
    packed = PackedCollate(sampler.batch_size, sampler.inputs, allowed_shapes(examples, sampler))
    once = plan.steps is not None
    recurs = once and plan.steps.are_several
    return Dataset(examples, PackedTreeCollate(packed, plan.prefix, recurs, once), sampler)
