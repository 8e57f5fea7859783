"""A batch, what makes one of examples, and the examples of a phase and split in batches.

Nothing here knows what the examples of a task are.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

T = TypeVar("T")
Array = Any  # NumPy's, or MLX's once an objective has prepared the batch
Layout = tuple  # hashable, as the spans of packed examples
Shape = tuple[int, int]  # of a batch, as the memory plan counts it


class Tree(NamedTuple):
    """The layout of groups of rows that begin alike: ``prefix`` int32 [groups, prefix] has it once.

    ``tokens`` [R, S] have what follows, as many rows of each group in turn. Where all groups begin
    alike, too, ``root`` int32 [1, root] has that once, and ``prefix`` [groups, prefix - root] what
    follows it. Positions count the inputs of the root, of prefixes, and then of rows.
    """

    groups: int
    prefix: int  # inputs that the rows of each group begin with, the root included
    root: int = 0  # inputs that all rows begin with, where these are computed before the prefixes


class ExampleSet(Protocol):
    """The encoded examples of a split, or of several."""

    def __len__(self) -> int:
        """Return how many there are."""

    def where(self, i: int) -> str:
        """Return the row of an example as messages name it: ``train.jsonl:17``."""

    @property
    def count(self) -> int:
        """How many there are as people count them: a preference is one."""
        return len(self)

    def where_of(self, indices: Sequence[int]) -> list[str]:
        """Return the rows of some examples."""
        return [self.where(i) for i in indices]


@dataclass(frozen=True, eq=False)
class Batch:
    """Some examples as the arrays of one step."""

    inputs: dict[str, Array]  # what `Objective.loss` reads
    targets: int  # real ones, which throughput counts
    denominator: float  # what the sum of the loss is divided by
    examples: tuple[int, ...] = ()  # indices
    source: Any = None  # the examples that these are of
    layout: Layout = ()  # constants that are compiled into the step
    starts: tuple[int, ...] = ()  # where each example begins among all inputs
    computed: int = 0  # inputs without padding; 0 where they are not counted
    number: int = 0  # which of the training batches of its phase it is
    row_inputs: Mapping[str, Array] = field(default_factory=dict)  # of a tree, as without it

    @property
    def rows(self) -> list[str]:
        """Its rows as messages name them."""
        return self.source.where_of(self.examples)

    def having(self, **inputs: Array) -> "Batch":
        """Return the batch with more arrays, or others in their places."""
        return dataclasses.replace(self, inputs=self.inputs | inputs)


class Collate(Protocol):
    """Makes batches of examples."""

    def __call__(self, examples: Any, order: Any) -> Batch:
        """Return the batch of one order of a sampler."""

    def shapes(self, examples: Any, orders: Iterator[Any]) -> set[Shape]:
        """Return the shapes of batches without laying them out."""

    def split(self, batch: Batch, parts: int) -> list[Batch]:
        """Return a batch in at most ``parts`` pieces; sums and denominators add up to its own.

        They are micro-batches, or the shares of ranks. One may consist of padding.
        """


class BatchSampler(Protocol):
    """Which examples each batch has."""

    def batches(self, start: int = 0) -> Iterator[Any]:
        """Yield the order of each batch without end, from batch number ``start``."""

    def epoch(self, number: int) -> Sequence[Any]:
        """Return the order of each batch of an epoch."""


@dataclass(frozen=True)
class FixedOrder:
    """The same batches in every epoch, as examples are evaluated."""

    orders: Sequence[Any]

    def batches(self, start: int = 0) -> Iterator[Any]:
        return itertools.islice(itertools.cycle(self.orders), start, None)

    def epoch(self, number: int) -> Sequence[Any]:
        return self.orders


@dataclass(frozen=True)
class Dataset:
    """The examples of a phase and split, and how they become batches."""

    examples: Any
    collate: Collate
    sampler: BatchSampler

    def batches(self, start: int = 0) -> Iterator[Batch]:
        for number, order in enumerate(self.sampler.batches(start), start):
            yield dataclasses.replace(self.collate(self.examples, order), number=number)

    def once(self) -> list[Batch]:
        return [self.collate(self.examples, order) for order in self.sampler.epoch(0)]

    def batches_per_epoch(self) -> int:
        return len(self.sampler.epoch(0))

    def shapes(self, batches: int) -> set[Shape]:
        orders = itertools.islice(self.sampler.batches(), batches)
        return self.collate.shapes(self.examples, orders)


def by_length(lengths: np.ndarray, batch_size: int, chosen: np.ndarray) -> FixedOrder:
    """Return batches of the chosen examples, each of examples of like length."""
    chosen = np.sort(chosen)
    order = chosen[np.argsort(np.asarray(lengths)[chosen], kind="stable")]
    return FixedOrder([order[i : i + batch_size] for i in range(0, len(order), batch_size)])


def first_examples(count: int, batch_size: int, batches: int) -> np.ndarray:
    """Return the indices of the examples that fill ``batches`` batches; -1 is all."""
    if batches >= 0:
        count = min(count, batches * batch_size)
    return np.arange(count)


def edges_of(rows: int, parts: int) -> list[tuple[int, int]]:
    """Return where each of at most ``parts`` pieces starts and stops."""
    edges = np.linspace(0, rows, min(parts, rows) + 1).round().astype(int).tolist()
    return list(zip(edges, edges[1:], strict=False))


def prefetched(items: Iterator[T]) -> Iterator[T]:
    """Yield the same items, each made while the one before is used; errors keep their places."""
    with ThreadPoolExecutor(1, "ahead") as thread:
        ahead = thread.submit(next, items, None)
        while (item := ahead.result()) is not None:
            ahead = thread.submit(next, items, None)
            yield item
