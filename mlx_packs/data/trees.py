"""Trees: rows that begin alike, whose common beginning is computed once.

R rows of T inputs are G groups of R / G rows that follow each other. Where the first P inputs of
the rows of each group are the same, the arrays of the batch become

    prefix     int32 [G, P]
    tokens     int32 [R, T - P], the suffixes
    positions  int32 [M], which of the G x P inputs of prefixes, and then of the R x (T - P) inputs
               of suffixes, predicts each target

Where the first Q inputs of all rows are the same, and P - Q more in each group, these are a level
of their own: ``root`` int32 [1, Q], and ``prefix`` [G, P - Q]. Positions count the root first.

It has the targets of the batch of rows, and so the same loss: a target inside a prefix is there
once for each row.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from .. import runtime
from .batches import TokenCollate, few_shapes, split_rows
from .dataset import Batch, Dataset, Tree, by_length
from .encoding import Example, Examples
from .sampler import Sampler
from .shapes import Shape, TreeShape, sequence_inputs

LEAST = 16  # inputs of a prefix; shorter ones cost more than they save
STEP = 8  # a prefix has a multiple of these, and what is left of it is in the suffixes
WORTHWHILE = 0.15  # least share of the inputs of a batch that is saved
ROOT_WORTHWHILE = 0.1  # least share of the inputs of a tree that a root saves, one more pass


def common_inputs(examples: Iterable[Example]) -> int:
    """Count the inputs that all examples begin with; 0 if they are too few for a prefix."""
    return common_length(example.tokens[:-1] for example in examples)


def common_length(sequences: Iterable[np.ndarray]) -> int:
    """Count the tokens that all sequences begin with; 0 if they are too few for a prefix."""
    shared = None
    for inputs in sequences:
        if shared is not None:
            length = min(len(shared), len(inputs))
            differing = np.flatnonzero(shared[:length] != inputs[:length])
            if len(differing):
                length = differing[0]
            inputs = inputs[:length]
        shared = inputs
        if len(shared) < LEAST:
            return 0

    return 0 if shared is None else len(shared)


def prefix_of(common: int) -> int:
    """Return the inputs of a prefix of rows that share ``common`` inputs; 0 if too few."""
    prefix = common // STEP * STEP
    return prefix if prefix >= LEAST else 0


def saved_share(shape: tuple[float, float], groups: float, prefix: float, root: float = 0) -> float:
    """Return the share of the inputs of [R, T] that a tree does not compute."""
    rows, inputs = shape
    return ((rows - groups) * prefix + (groups - 1) * root) / (rows * inputs)


def root_of(common: int, shape: tuple[float, float], groups: float, prefix: float) -> int:
    """Return the inputs of the root of a tree of [R, T]; 0 if it saves too little."""
    root = min(prefix_of(common), int(prefix) // STEP * STEP)
    of_tree = 1 - saved_share(shape, groups, prefix)
    saved = of_tree - (1 - saved_share(shape, groups, prefix, root))
    return root if saved >= ROOT_WORTHWHILE * of_tree else 0


def planted(batch: Batch, layout: Tree) -> Batch:
    """Return the tree of a batch of rows; rows without an example take any prefix."""
    tokens = batch.inputs["tokens"]
    positions = batch.inputs["positions"]
    groups = layout.groups
    prefix = layout.prefix
    root = layout.root
    rows, width = tokens.shape
    together = rows // groups
    branch = prefix - root  # inputs of a prefix after the root
    computed = root + groups * branch  # inputs before the suffixes

    row = positions // width
    at = positions % width
    in_branch = row // together * branch + at
    in_suffix = computed + row * (width - prefix) + at - prefix
    in_prefix = np.where(at < root, at, in_branch)
    arrays = {
        "prefix": tokens[::together, root:prefix],
        "tokens": tokens[:, prefix:],
        "positions": np.where(at < prefix, in_prefix, in_suffix).astype(np.int32),
    }
    if root:
        arrays["root"] = tokens[:1, :root]
    row_inputs = {"tokens": tokens, "positions": positions}
    return dataclasses.replace(batch.having(**arrays), layout=layout, row_inputs=row_inputs)


def felled(batch: Batch) -> Batch:
    """Undo `planted`; arrays that were added since stay."""
    inputs = {name: array for name, array in batch.inputs.items() if name not in ("root", "prefix")}
    return dataclasses.replace(batch, inputs=inputs | batch.row_inputs, layout=(), row_inputs={})


@dataclass(frozen=True)
class TreeCollate:
    """Lays out rows that begin alike as trees, where that saves enough.

    The rows of a group follow each other in every order of the sampler.
    """

    tokens: TokenCollate  # lays out the rows, padded after the prefix of all batches
    common: np.ndarray | None = None  # inputs that each group has in common; None: of all batches
    together: int = 0  # rows of a group; 0 is all rows of a batch
    least: float = WORTHWHILE  # share of the inputs that a tree has to save
    root: int = 0  # inputs that all groups have in common, where a level of their own pays

    @property
    def batch_size(self) -> int:
        return self.tokens.batch_size

    def __call__(self, examples: Examples, order: np.ndarray) -> Batch:
        padded = self.of(order)
        return padded.tree(padded.tokens(examples, order), padded.tokens.prefix)

    def shapes(self, examples: Examples, orders: Iterator[np.ndarray]) -> set[Shape]:
        shapes = set()
        for order in orders:
            padded = self.of(order)
            shapes.add(padded.planned(*padded.tokens.shape(examples, order), padded.tokens.prefix))
        return shapes

    def split(self, batch: Batch, parts: int) -> list[Batch]:
        """Pieces of a tree are trees if that saves enough."""
        together = max(self.together, 1)
        if not isinstance(batch.layout, Tree):
            return split_rows(batch, parts, together)
        pieces = split_rows(felled(batch), parts, together)
        return [self.tree(piece, batch.layout.prefix) for piece in pieces]

    def tree(self, batch: Batch, prefix: int) -> Batch:
        """Return the tree of a batch of rows, if it saves enough."""
        layout = self._layout(batch.inputs["tokens"].shape, prefix)
        return batch if layout is None else planted(batch, layout)

    def _layout(self, shape: tuple[int, int], prefix: int) -> Tree | None:
        rows = shape[0]
        groups = rows // self.together if self.together else 1
        if not prefix or rows == groups:
            return None

        root = self.root if groups > 1 else 0
        if root and prefix < root + LEAST:  # groups have too little else in common
            groups = 1
            prefix = root
            root = 0
        if saved_share(shape, groups, prefix, root) < self.least:
            return None
        return Tree(groups, prefix, root=root)

    def planned(self, width: int, slots: int, prefix: int) -> Shape:
        """Return the shape of a batch, given its rows: T of them and M targets."""
        layout = self._layout((self.batch_size, width), prefix)
        if layout is None:
            return width, slots
        together = self.together if layout.groups > 1 else 0
        return TreeShape(width, slots, layout.prefix, together, layout.root)

    def of(self, order: np.ndarray) -> "TreeCollate":
        """Return the collate of a batch, padded after what its groups have in common."""
        if self.common is None:
            return self
        groups = np.asarray(order)[:: self.together] // self.together
        prefix = prefix_of(int(self.common[groups].min()))
        return dataclasses.replace(self, tokens=dataclasses.replace(self.tokens, prefix=prefix))


@dataclass(frozen=True)
class TreePlan:
    """How batches whose rows begin alike are laid out: with a prefix of all, or of each group."""

    batch_size: int  # rows
    prefix: int = 0  # inputs that all examples begin with
    common: np.ndarray | None = None  # or inputs that the examples of each group begin with
    together: int = 0  # examples of a group
    least: float = WORTHWHILE  # share of the inputs of a batch that a tree has to save
    root: int = 0  # inputs that all groups have in common, where a level of their own pays

    @classmethod
    def of(
        cls,
        examples: Examples,
        chosen: np.ndarray,
        batch_size: int,
        together: int,
        least: float,
    ) -> "TreePlan":
        """Return the plan that saves most of the inputs of chosen examples."""
        prefix = prefix_of(common_inputs(examples[i] for i in chosen))
        of_all = cls(batch_size, prefix, least=least)
        if not together:
            return of_all

        groups = range(0, len(examples), together)
        common = [common_inputs(examples[i + k] for k in range(together)) for i in groups]
        of_groups = cls(batch_size, 0, np.array(common), together, least)
        shape = batch_size, float(examples.lengths.mean()) - 1
        root = root_of(prefix, shape, batch_size / together, of_groups.mean_prefix)
        of_groups = dataclasses.replace(of_groups, root=root)
        return max(of_groups, of_all, key=lambda plan: plan.saved(examples))

    @property
    def mean_prefix(self) -> float:
        """The inputs of the prefix of a group, on average."""
        if self.common is None:
            return self.prefix
        return float(np.mean([prefix_of(common) for common in self.common]))

    def saved(self, examples: Examples) -> float:
        """Return the share of the inputs of batches that is saved, about."""
        inputs = float(examples.lengths.mean()) - 1
        groups = self.batch_size / (self.together or self.batch_size)
        return saved_share((self.batch_size, inputs), groups, self.mean_prefix, self.root)

    def to_json(self, examples: Examples) -> dict:
        tokens = self.prefix if self.common is None else float(self.common.mean())
        return {"tokens": tokens, "saved": self.saved(examples), "root": self.root}

    def collate(self, examples: Examples, sampler: Sampler) -> TreeCollate:
        """Without groups, a compiled step has few shapes."""
        allowed = None
        if runtime.COMPILES and self.common is None:
            allowed = few_shapes(examples, sampler, self.prefix)

        tokens = TokenCollate(sampler.batch_size, sampler.inputs, allowed, self.prefix)
        return TreeCollate(tokens, self.common, self.together, self.least, self.root)

    def dataset(self, examples: Examples, sampler: Sampler) -> Dataset:
        return Dataset(examples, self.collate(examples, sampler), sampler)

    def held_out(self, examples: Examples, max_seq_length: int, chosen: np.ndarray) -> Dataset:
        """Return the chosen examples once, by length."""
        sampler = Sampler(examples.lengths, self.batch_size, sequence_inputs(max_seq_length))
        order = by_length(examples.lengths, self.batch_size, chosen)
        return Dataset(examples, self.collate(examples, sampler), order)
