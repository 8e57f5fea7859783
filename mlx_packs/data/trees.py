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
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .. import runtime
from .batches import TokenCollate, few_shapes, split_rows
from .dataset import Batch, Dataset, FixedOrder, Tree, by_length
from .encoding import Example, Examples
from .sampler import Sampler
from .shapes import Shape, sequence_inputs

LEAST = 16  # inputs of a prefix; shorter ones cost more than they save
STEP = 8  # a prefix has a multiple of these, and what is left of it is in the suffixes
# Of the memory of saved inputs, what their keys and values take, which each row has. With it plans
# of five small models are 3 % below to 26 % above the peak (`benchmarks/plan_accuracy.py`).
_KEPT = 0.05
# What the prefix of an update costs, in steps on it: its keys and values first, and then a step.
_PASSES = 1.5
WORTHWHILE = 0.15  # least share of the inputs of a batch that is saved


def common_inputs(examples: Iterable[Example]) -> int:
    """Return how many inputs all examples begin with; the last token of each is no input."""
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

    return 0 if shared is None else len(shared)


def prefix_of(common: int) -> int:
    """Return the inputs of a prefix of rows that have so many in common; 0 if these are too few."""
    prefix = common // STEP * STEP
    return prefix if prefix >= LEAST else 0


def saved_share(shape: tuple[float, float], groups: float, prefix: float) -> float:
    """Return the share of the inputs of a batch of [R, T] that its tree does not compute."""
    rows, inputs = shape
    return (rows - groups) * prefix / (rows * inputs)


def planned_share(saved: float) -> float:
    """Return the memory of a tree that saves such a share of inputs, by the memory of its rows."""
    return 1 - (1 - _KEPT) * saved


def planted(batch: Batch, prefix: int, groups: int, recurs: bool = False) -> Batch:
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
    return dataclasses.replace(tree, layout=Tree(groups, prefix, recurs))


def felled(batch: Batch) -> Batch:
    """Return the batch of rows that a tree was made of; undoes `planted`."""
    inputs = dict(batch.inputs)
    prefixes, suffixes = inputs.pop("prefix"), inputs["tokens"]
    groups, prefix = prefixes.shape
    rows, width = suffixes.shape[0], prefix + suffixes.shape[1]

    # an example starts a row, which tells the row of a target inside a prefix; padding takes 0
    owner = np.array([*batch.starts, 0])[inputs["owners"]] // width
    positions = inputs["positions"]
    of_suffixes = positions - groups * prefix
    in_rows = of_suffixes // (width - prefix) * width + prefix + of_suffixes % (width - prefix)
    inside = owner * width + positions % prefix

    inputs["tokens"] = np.concatenate(
        [np.repeat(prefixes, rows // groups, axis=0), suffixes], axis=1
    )
    inputs["positions"] = np.where(of_suffixes < 0, inside, in_rows).astype(np.int32)
    return dataclasses.replace(batch, inputs=inputs, layout=())


class Steps(NamedTuple):
    """The steps of an update, which compute what all examples begin with once."""

    batches: int
    pieces: int  # of a batch

    @property
    def are_several(self) -> bool:
        """Whether a step follows another one."""
        return self.batches * self.pieces > 1


@dataclass(frozen=True)
class TreeCollate:
    """Lays out rows that begin alike as trees, where that saves enough.

    The rows of a group follow each other in every order of the sampler.
    """

    tokens: TokenCollate  # lays out the rows, padded after the prefix of all batches
    common: np.ndarray | None = None  # inputs that each group has in common; None: of all batches
    together: int = 0  # rows of a group; 0 is all rows of a batch
    least: float = WORTHWHILE  # share of the inputs that a tree has to save
    steps: Steps | None = None  # of an update that computes a prefix once; None is each of them

    @property
    def batch_size(self) -> int:
        """The rows of a batch."""
        return self.tokens.batch_size

    def __call__(self, examples: Examples, order: np.ndarray) -> Batch:
        """Return the examples with these indices as a batch."""
        tokens = self._tokens_of(order)
        return self.tree(tokens(examples, order), tokens.prefix)

    def shapes(self, examples: Examples, orders: Iterator[np.ndarray]) -> set[Shape]:
        """Return (T, M) of batches of rows that take about as much memory as the trees."""
        return {self._planned(examples, order) for order in orders}

    def split(self, batch: Batch, parts: int) -> list[Batch]:
        """Return the rows of a batch in pieces, which are trees where that saves enough."""
        if not isinstance(batch.layout, Tree):
            return split_rows(batch, parts, together=max(self.together, 1))
        pieces = split_rows(felled(batch), parts, together=max(self.together, 1))
        return self.pieces(pieces, batch.layout)

    def pieces(self, rows: list[Batch], layout: Tree) -> list[Batch]:
        """Return the trees of pieces of a tree, which were made of its rows."""
        if self.steps is not None and layout.groups == 1:
            return [planted(piece, layout.prefix, 1, recurs=True) for piece in rows]
        return [self.tree(piece, layout.prefix) for piece in rows]

    def tree(self, batch: Batch, prefix: int) -> Batch:
        """Return the tree of a batch of rows, where it saves enough."""
        shape = batch.inputs["tokens"].shape
        groups = 1
        if self.together:
            groups = shape[0] // self.together

        recurs = self.steps is not None and self.steps.are_several and not self.together
        if prefix and recurs:
            return planted(batch, prefix, 1, recurs=True)
        if not prefix or shape[0] == groups or saved_share(shape, groups, prefix) < self.least:
            return batch
        return planted(batch, prefix, groups)

    def _planned(self, examples: Examples, order: np.ndarray) -> Shape:
        """Return the shape of a batch of rows that takes about as much memory as a tree."""
        tokens = self._tokens_of(order)
        width, slots = tokens.shape(examples, order)
        groups = 1
        if self.together:
            groups = self.batch_size // self.together

        saved = saved_share((self.batch_size, width), groups, tokens.prefix)
        if saved < self.least:
            return width, slots
        return math.ceil(width * planned_share(saved)), slots

    def _tokens_of(self, order: np.ndarray) -> TokenCollate:
        """Return what lays out the rows of a batch, padded after what its groups have in common."""
        if self.common is None:
            return self.tokens
        groups = np.asarray(order)[:: self.together] // self.together
        return dataclasses.replace(self.tokens, prefix=prefix_of(int(self.common[groups].min())))


@dataclass(frozen=True)
class TreePlan:
    """How batches whose rows begin alike are laid out.

    Either all rows of a batch have the same prefix, or the rows of each group have one.
    """

    batch_size: int  # rows
    prefix: int = 0  # inputs that all examples begin with
    common: np.ndarray | None = None  # or inputs that the examples of each group begin with
    together: int = 0  # examples of a group
    least: float = WORTHWHILE  # share of the inputs of a batch that a tree has to save
    steps: Steps | None = None  # of an update that computes the prefix of all once; None is each

    @classmethod
    def of(
        cls,
        examples: Examples,
        chosen: np.ndarray,
        batch_size: int,
        together: int,
        least: float,
        steps: Steps | None = None,
    ) -> "TreePlan":
        """Return the plan that saves most of the inputs of chosen examples."""
        prefix = prefix_of(common_inputs(examples[i] for i in chosen))
        of_all = cls(batch_size, prefix, least=least, steps=steps)
        if not together:
            return of_all

        groups = range(0, len(examples), together)
        common = [common_inputs(examples[i + k] for k in range(together)) for i in groups]
        of_groups = cls(batch_size, 0, np.array(common), together, least, steps)
        return max(of_groups, of_all, key=lambda plan: plan.saved(examples))

    def saved(self, examples: Examples) -> float:
        """Return the share of the inputs of batches that is saved, about."""
        inputs = float(examples.lengths.mean()) - 1
        if self.common is None:
            if self.steps is None or not self.steps.are_several:
                return saved_share((self.batch_size, inputs), 1, self.prefix)
            rows = self.batch_size * self.steps.batches
            return max(saved_share((rows, inputs), _PASSES, self.prefix), 0.0)

        prefix = np.mean([prefix_of(common) for common in self.common])
        return saved_share((self.together, inputs), 1, float(prefix))

    def to_json(self, examples: Examples) -> dict:
        """Return the part of a run's report on it."""
        tokens = self.prefix if self.common is None else float(self.common.mean())
        return {"tokens": tokens, "saved": self.saved(examples)}

    def collate(self, examples: Examples, sampler: Sampler) -> TreeCollate:
        """Return what lays out the batches of a sampler."""
        allowed = None
        if runtime.COMPILES and self.common is None:
            allowed = few_shapes(examples, sampler, self.prefix)
        tokens = TokenCollate(sampler.batch_size, sampler.inputs, allowed, self.prefix)
        return TreeCollate(tokens, self.common, self.together, self.least, self.steps)

    def dataset(
        self, examples: Examples, sampler: Sampler, order: FixedOrder | None = None
    ) -> Dataset:
        """Return the batches of a sampler, or in a fixed order, as trees."""
        return Dataset(examples, self.collate(examples, sampler), order or sampler)

    def held_out(self, examples: Examples, max_seq_length: int, chosen: np.ndarray) -> Dataset:
        """Return the chosen examples once, by length."""
        sampler = Sampler(examples.lengths, self.batch_size, sequence_inputs(max_seq_length))
        order = by_length(examples.lengths, self.batch_size, chosen)
        plan = dataclasses.replace(self, steps=None)
        return plan.dataset(examples, sampler, order)
