"""Trees: rows that begin alike, whose common beginning is computed once.

R rows of T inputs are G groups of R / G rows that follow each other. Where the first P inputs of
the rows of each group are the same, the arrays of the batch become

    prefix     int32 [G, P]
    tokens     int32 [R, T - P], the suffixes
    positions  int32 [M], which of the G x P inputs of prefixes, and then of the R x (T - P) inputs
               of suffixes, predicts each target

Its targets are those of the batch of rows, so its loss is, too: a target inside a prefix is there
once for each row.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from .. import runtime
from .batches import TokenCollate, few_shapes, split_rows
from .dataset import Batch, Dataset, FixedOrder, Tree, by_length
from .encoding import Example, Examples
from .sampler import Order, Sampler
from .shapes import Shape, sequence_inputs

LEAST = 16  # inputs of a prefix; shorter ones cost more than they save
STEP = 8  # a prefix has a multiple of these, and what is left of it is in the suffixes
WORTHWHILE = 0.15  # least share of the inputs of a batch that is saved


def common_prefix(examples: Iterable[Example]) -> int:
    """Return how many inputs of all examples can be a prefix; 0 if these are too few."""
    shared = None
    for example in examples:
        inputs = example.tokens[:-1]
        if shared is not None:
            length = min(len(shared), len(inputs))
            differing = np.flatnonzero(shared[:length] != inputs[:length])
            inputs = inputs[: differing[0] if len(differing) else length]
        shared = inputs
        if len(shared) < LEAST:
            return 0

    return 0 if shared is None else len(shared) // STEP * STEP


def saved_share(shape: tuple[float, float], groups: int, prefix: int) -> float:
    """Return the share of the inputs of a batch of [R, T] that its tree does not compute."""
    rows, inputs = shape
    return (rows - groups) * prefix / (rows * inputs)


def planted(batch: Batch, prefix: int, groups: int) -> Batch:
    """Return the tree of a batch of rows; rows without an example take any prefix."""
    tokens, positions = batch.inputs["tokens"], batch.inputs["positions"]
    rows, width = tokens.shape
    together = rows // groups

    row, at = positions // width, positions % width
    in_prefix = row // together * prefix + at
    in_suffix = groups * prefix + row * (width - prefix) + at - prefix
    tree = batch.having(
        prefix=tokens[::together, :prefix],
        tokens=tokens[:, prefix:],
        positions=np.where(at < prefix, in_prefix, in_suffix).astype(np.int32),
    )
    return dataclasses.replace(tree, layout=Tree(groups, prefix))


def felled(batch: Batch) -> Batch:
    """Return the batch of rows that a tree was made of; undoes `planted`."""
    inputs = dict(batch.inputs)
    prefixes, suffixes = inputs.pop("prefix"), inputs["tokens"]
    groups, prefix = prefixes.shape
    rows, width = suffixes.shape[0], prefix + suffixes.shape[1]

    # an example is a row, so that its number tells the row of a target inside a prefix
    owner = np.maximum(inputs["owners"], 0)
    positions = inputs["positions"]
    of_suffixes = positions - groups * prefix
    in_rows = of_suffixes // (width - prefix) * width + prefix + of_suffixes % (width - prefix)
    inside = owner * width + positions % prefix

    inputs["tokens"] = np.concatenate(
        [np.repeat(prefixes, rows // groups, axis=0), suffixes], axis=1
    )
    inputs["positions"] = np.where(of_suffixes < 0, inside, in_rows).astype(np.int32)
    return dataclasses.replace(batch, inputs=inputs, layout=())


@dataclass(frozen=True)
class TreeCollate:
    """Lays out rows that begin alike as trees, where that saves enough.

    The rows of a group follow each other in every order of the sampler.
    """

    tokens: TokenCollate  # lays out the rows, padded after their prefix
    together: int = 0  # rows of a group; 0 is all rows of a batch
    least: float = WORTHWHILE  # share of the inputs that a tree has to save

    def __call__(self, examples: Examples, order: Order) -> Batch:
        """Return the examples with these indices as a batch."""
        return self._tree(self.tokens(examples, order))

    def shapes(self, examples: Examples, orders: Iterator[Order]) -> set[Shape]:
        """Return (T, M) of the rows of batches."""
        return self.tokens.shapes(examples, orders)

    def split(self, batch: Batch, parts: int) -> list[Batch]:
        """Return the rows of a batch in pieces, which are trees where that saves enough."""
        rows = felled(batch) if "prefix" in batch.inputs else batch
        pieces = split_rows(rows, parts, together=max(self.together, 1))
        return [self._tree(piece) for piece in pieces]

    def _tree(self, batch: Batch) -> Batch:
        shape = batch.inputs["tokens"].shape
        prefix = self.tokens.prefix
        groups = shape[0] // self.together if self.together else 1
        if shape[0] == groups or saved_share(shape, groups, prefix) < self.least:
            return batch
        return planted(batch, prefix, groups)


@dataclass(frozen=True)
class TreePlan:
    """How batches whose rows begin alike are laid out."""

    prefix: int  # inputs that all examples begin with
    batch_size: int
    least: float = WORTHWHILE  # share of the inputs of a batch that a tree has to save

    def saved(self, examples: Examples) -> float:
        """Return the share of the inputs of batches that is saved, on average."""
        inputs = float(examples.lengths.mean()) - 1
        return saved_share((self.batch_size, inputs), 1, self.prefix)

    def to_json(self, examples: Examples) -> dict:
        """Return the part of a run's report on it."""
        return {"tokens": self.prefix, "saved": self.saved(examples)}

    def dataset(
        self, examples: Examples, sampler: Sampler, order: FixedOrder | None = None
    ) -> Dataset:
        """Return the batches of a sampler, or in a fixed order, as trees."""
        allowed = few_shapes(examples, sampler, self.prefix) if runtime.COMPILES else None
        tokens = TokenCollate(sampler.batch_size, sampler.inputs, allowed, self.prefix)
        return Dataset(examples, TreeCollate(tokens, least=self.least), order or sampler)

    def held_out(self, examples: Examples, max_seq_length: int, chosen: np.ndarray) -> Dataset:
        """Return the chosen examples once, by length."""
        sampler = Sampler(examples.lengths, self.batch_size, sequence_inputs(max_seq_length))
        order = by_length(examples.lengths, self.batch_size, chosen)
        return self.dataset(examples, sampler, order)
