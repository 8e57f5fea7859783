"""Batches of preferences: both examples of a row are in the same batch."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .batches import TokenCollate, allowed_shapes, split_rows, token_collate
from .dataset import Batch, Dataset, FixedOrder, Tree, by_length
from .encoding import Examples
from .sampler import GroupedSampler, Order, grouped
from .shapes import Shape
from .trees import TreeCollate, TreePlan, felled

_OF_ROWS = ("labels", "reference")  # arrays of which each row has its own part


@dataclass(frozen=True)
class LabelledCollate:
    """Lays out the examples of rows as tokens, and adds the ``labels`` of rows, float32 [slots].

    Examples 2 p and 2 p + 1 of a batch are of row p; labels are 1 where the first one is
    desirable. A loss is a mean over rows.
    """

    tokens: TokenCollate | TreeCollate  # lays out the examples

    def __call__(self, examples: Examples, order: Order) -> Batch:
        batch = self.tokens(examples, order)
        labels = examples.labels[[i // 2 for i in batch.examples[::2]]]
        return _with_rows(batch, {"labels": labels}, self.tokens.batch_size)

    def shapes(self, examples: Examples, orders: Iterator[Order]) -> set[Shape]:
        return self.tokens.shapes(examples, orders)

    def split(self, batch: Batch, parts: int) -> list[Batch]:
        if isinstance(batch.layout, Tree):
            rows = self.split(felled(batch), parts)
            return self.tokens.pieces(rows, batch.layout)

        of_rows = {n: np.asarray(batch.inputs[n]) for n in _OF_ROWS if n in batch.inputs}
        tokens = {n: values for n, values in batch.inputs.items() if n not in of_rows}
        whole = dataclasses.replace(batch, inputs=tokens)

        divided = []
        start = 0
        for piece in split_rows(whole, parts, together=2):
            stop = start + len(piece.examples) // 2
            parts_of_rows = {name: values[start:stop] for name, values in of_rows.items()}
            divided.append(_with_rows(piece, parts_of_rows, len(piece.inputs["tokens"])))
            start = stop
        return divided


def _with_rows(batch: Batch, of_rows: dict[str, np.ndarray], sequences: int) -> Batch:
    """Make the loss a mean over rows, and pad their arrays."""
    padded = {}
    for name, values in of_rows.items():
        padding = [(0, sequences // 2 - len(values)), *[(0, 0)] * (values.ndim - 1)]
        padded[name] = np.pad(values, padding)
    return dataclasses.replace(batch.having(**padded), denominator=len(batch.examples) // 2)


def preference_set(
    examples: Examples, sampler: GroupedSampler, trees: TreePlan | None = None
) -> Dataset:
    """Without ``trees`` batches have few shapes if each costs a compilation."""
    if trees is not None:
        tokens = trees.collate(examples, sampler)
    else:
        tokens = token_collate(sampler, allowed_shapes(examples, sampler))
    return Dataset(examples, LabelledCollate(tokens), sampler)


def preference_evaluation(
    examples: Examples,
    batch_size: int,
    inputs: int,
    chosen: np.ndarray,
    trees: TreePlan | None = None,
) -> Dataset:
    """Return the chosen rows once, by length."""
    sampler = GroupedSampler(examples.lengths, 2 * batch_size, inputs)
    rows = by_length(examples.row_lengths.max(axis=1), batch_size, chosen)
    order = FixedOrder([grouped(each) for each in rows.orders])
    return dataclasses.replace(preference_set(examples, sampler, trees=trees), sampler=order)
