"""Groups: examples that begin alike, such as the questions on each of many documents.

A batch has blocks of as many rows each, and the rows of a block begin alike: it is a tree of
several prefixes (data/trees.py). Each epoch cuts the groups into blocks anew. What no group has is
in ordinary batches.
"""

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from .. import runtime
from .batches import TokenCollate
from .dataset import Batch, Dataset, FixedOrder, Tree
from .encoding import Examples
from .sampler import Sampler
from .shapes import Shape, joined_shapes, sequence_inputs
from .token_store import Example
from .trees import (
    LEAST,
    ROOT_WORTHWHILE,
    STEP,
    TreeCollate,
    TreePlan,
    common_length,
    prefix_of,
    saved_share,
)

EMPTY = -1  # in an order, a row without an example
_WINDOW = 32  # batches among which blocks of like prefixes are put together, as are like lengths


class TokenOrder(NamedTuple):
    """Examples sorted by their tokens; an example that begins others comes before them."""

    indices: np.ndarray  # int64 [N]
    common: np.ndarray  # int64 [N], `common_length` of each and the one before it


def token_order(examples: Sequence[Example], chosen: np.ndarray) -> TokenOrder:
    """Equal examples stay in their order; the tokens of all are in memory meanwhile."""
    indices = np.array(chosen, dtype=np.int64)
    keys = [examples[i].tokens.astype(">i4").tobytes() for i in indices.tolist()]
    places = sorted(range(len(keys)), key=keys.__getitem__)
    tokens = (np.frombuffer(keys[place], np.int32) for place in places)
    common = [0, *map(common_length, itertools.pairwise(tokens))][: len(places)]
    return TokenOrder(indices[places], np.array(common, dtype=np.int64))


@dataclass(frozen=True)
class Groups:
    """Which examples begin alike, each in one group at most."""

    members: Sequence[np.ndarray]  # indices of the examples of each group
    prefixes: np.ndarray  # int64 [G], inputs that the examples of each group begin with
    rest: np.ndarray  # indices of examples without a group
    numbers: np.ndarray  # int64 [N], the group of each example, -1 without one

    def batches(self, batch_size: int, together: int) -> int:
        """Count the batches of an epoch, in blocks of at most ``together`` examples."""
        blocks = sum(-(-len(group) // together) for group in self.members)
        return -(-blocks * together // batch_size) + -(-len(self.rest) // batch_size)

    def prefix_of(self, order: np.ndarray) -> int:
        """Return the inputs that the blocks of a batch share, each in itself; 0 without groups."""
        numbers = self.numbers[order[order != EMPTY]]
        if numbers[0] < 0:
            return 0
        return int(self.prefixes[numbers].min())


@dataclass
class _Interval:
    """Sorted examples from ``start``, which have ``common`` inputs in common, while they are read.

    ``cost`` is the cost of the examples so far, as rows or smaller groups, whichever is less.
    """

    common: int
    start: int
    cost: float


def find_groups(examples: Examples, order: TokenOrder, together: int, root: int = 0) -> Groups:
    """Return the groups of sorted examples that leave the fewest inputs to compute.

    Groups that begin alike could be a larger one with a shorter prefix, and so on: of these nested
    choices the cheapest is used, in blocks of ``together`` rows. The first ``root`` inputs, which
    all examples have in common, are not counted.
    """
    inputs = examples.lengths[order.indices] - 1
    common = order.common.copy()
    common[1:] = np.minimum(common[1:], np.minimum(inputs[1:], inputs[:-1]))
    totals = np.concatenate([[0], np.cumsum(inputs - root)])
    found: list[tuple[int, int, int]] = []  # start, stop and prefix of groups, those inside first

    def closed(interval: _Interval, stop: int) -> float:
        """Return the cost of an interval, which is noted if it is a group."""
        prefix = prefix_of(interval.common)
        if runtime.COMPILES:  # each value is a compilation: at most eight of them in an octave
            prefix -= prefix % max(STEP, 1 << max(prefix.bit_length() - 4, 0))

        total = int(totals[stop] - totals[interval.start])
        cost = _cost(stop - interval.start, total, prefix - root, together)
        if prefix < root + LEAST or cost >= interval.cost:
            return interval.cost

        while found and found[-1][0] >= interval.start:
            found.pop()
        found.append((interval.start, stop, prefix))
        return cost

    intervals = [_Interval(0, 0, 0.0)]
    for place in range(len(inputs)):
        following = int(common[place + 1]) if place + 1 < len(inputs) else 0

        start = place
        cost = float(inputs[place] - root)
        while intervals[-1].common > following:
            interval = intervals.pop()
            interval.cost += cost
            start = interval.start
            cost = closed(interval, place + 1)

        if intervals[-1].common < following:
            intervals.append(_Interval(following, start, cost))
        else:
            intervals[-1].cost += cost

    return _groups(order.indices, found, len(examples))


def _cost(rows: int, inputs: int, prefix: int, together: int) -> float:
    """Return the inputs that a group computes as blocks, empty rows included."""
    blocks = -(-rows // together)
    return blocks * (prefix + together * (inputs / rows - prefix))


def _groups(indices: np.ndarray, found: Sequence[tuple[int, int, int]], count: int) -> Groups:
    """``found`` has the start, stop and prefix of each group of the sorted ``indices``."""
    numbers = np.full(count, -1, dtype=np.int64)
    members = [np.sort(indices[start:stop]) for start, stop, _ in found]
    for number, group in enumerate(members):
        numbers[group] = number

    prefixes = np.array([prefix for *_, prefix in found], dtype=np.int64)
    rest = np.sort(indices[numbers[indices] < 0])
    return Groups(members, prefixes, rest, numbers)


@dataclass(frozen=True)
class GroupSampler(Sampler):
    """Batches of blocks of groups, and of the rest; they only depend on the fields.

    An order has an index for each row of the batch, or `EMPTY`.
    """

    groups: Groups = field(kw_only=True)
    together: int = field(kw_only=True)  # rows of a block

    def _cursor(self, start: int) -> tuple[int, int]:
        return divmod(start, self.groups.batches(self.batch_size, self.together))

    def epoch(self, number: int) -> list[np.ndarray]:
        """Return the batches of an epoch, with each example once."""
        random = np.random.default_rng([self.seed, number])
        batches = self._block_batches(random)
        rest = self.groups.rest
        if len(rest):
            sampler = Sampler(self.lengths[rest], self.batch_size, self.inputs, self.seed)
            batches += [rest[order] for order in sampler.epoch(number)]

        return [batches[i] for i in random.permutation(len(batches))]

    def _block_batches(self, random: np.random.Generator) -> list[np.ndarray]:
        """Return batches of blocks from all over the epoch, with prefixes of like length."""
        blocks = self._blocks(random)
        size = self.batch_size // self.together
        batches = []

        for start in range(0, len(blocks), _WINDOW * size):
            window = blocks[start : start + _WINDOW * size]
            of_blocks = self.groups.numbers[[block[0] for block in window]]
            longest = np.array([self.lengths[block].max() for block in window])
            order = np.lexsort([longest, self.groups.prefixes[of_blocks]])

            for places in _apart(of_blocks[order].tolist(), size):
                batch = np.full((size, self.together), EMPTY, dtype=np.int64)
                for row, place in zip(batch, order[places], strict=False):
                    row[: len(window[place])] = window[place]
                batches.append(batch.reshape(-1))

        return batches

    def _blocks(self, random: np.random.Generator) -> list[np.ndarray]:
        """Spread the blocks of each group over the epoch."""
        blocks = []
        times = []
        for members in self.groups.members:
            order = random.permutation(members)
            window = self.together * _WINDOW
            for start in range(0, len(order), window):
                part = order[start : start + window]
                order[start : start + window] = part[np.argsort(self.lengths[part], kind="stable")]

            count = -(-len(order) // self.together)
            blocks += np.array_split(order, count)  # of like sizes, so that batches are, too
            times.append((random.permutation(count) + random.random(count)) / count)

        if not blocks:
            return []
        return [blocks[i] for i in np.argsort(np.concatenate(times), kind="stable")]


def _apart(groups: Sequence[int], size: int) -> Iterator[list[int]]:
    """Yield the places of the blocks of each batch, which are of different groups if possible.

    Blocks come sorted, and a batch prefers neighbours, which are alike.
    """
    remaining = list(range(len(groups)))
    counts = Counter(groups)
    while remaining:
        first = max(remaining, key=lambda place: counts[groups[place]])
        chosen = [first]
        remaining.remove(first)
        while remaining and len(chosen) < size:
            taken = {groups[place] for place in chosen}
            others = [place for place in remaining if groups[place] not in taken]
            nearest = min(others or remaining, key=lambda place: abs(place - first))
            chosen.append(nearest)
            remaining.remove(nearest)

        counts.subtract(groups[place] for place in chosen)
        yield chosen


@dataclass(frozen=True)
class GroupCollate(TreeCollate):
    """Lays out batches of blocks as trees with a prefix for each block.

    ``trees`` lay out batches by the inputs that their blocks have in common; 0 is the rest.
    """

    groups: Groups = field(kw_only=True)
    trees: Mapping[int, TreeCollate] = field(kw_only=True)

    def of(self, order: np.ndarray) -> TreeCollate:
        return self.trees[self.groups.prefix_of(order)]

    def split(self, batch: Batch, parts: int) -> list[Batch]:
        """Return whole blocks of a batch, or pieces of blocks if there are fewer of these."""
        if not isinstance(batch.layout, Tree) or batch.layout.groups == 1:
            return self.trees[0].split(batch, parts)

        blocks = batch.layout.groups
        pieces = self.trees[batch.layout.prefix].split(batch, parts)
        if parts < 2 * blocks:
            return pieces
        return [each for piece in pieces for each in self.trees[0].split(piece, parts // blocks)]


@dataclass(frozen=True)
class GroupPlan:
    groups: Groups
    of_all: TreePlan  # how batches of the rest are laid out, which have the rows of all batches
    together: int  # rows of a block
    root: int = 0  # inputs that all examples begin with, where a level of their own pays

    @classmethod
    def of(cls, examples: Examples, chosen: np.ndarray, of_all: TreePlan) -> "GroupPlan | None":
        """Return the cheapest plan; None if no chosen examples are in groups."""
        order = token_order(examples, chosen)
        plans = {}
        # a block has two rows or more, and a batch two blocks or more
        most = of_all.batch_size // 2
        for together in (rows for rows in range(2, most + 1) if of_all.batch_size % rows == 0):
            for root in sorted({0, of_all.prefix}):
                groups = find_groups(examples, order, together, root)
                plan = cls(groups, of_all, together, root)
                cost = 1 - plan.saved(examples)
                if root:
                    cost /= 1 - ROOT_WORTHWHILE
                if groups.members:
                    plans.setdefault(cost, plan)

        if not plans:
            return None
        return plans[min(plans)]

    def saved(self, examples: Examples) -> float:
        """Estimate the share of the inputs that is saved."""
        groups = self.groups
        rest = groups.rest
        rows = computed = float((examples.lengths[rest] - 1).sum())
        if len(rest):
            shape = self.of_all.batch_size, rows / len(rest)
            computed *= 1 - saved_share(shape, 1, self.of_all.prefix)

        for group, prefix in zip(groups.members, groups.prefixes.tolist(), strict=True):
            inputs = int((examples.lengths[group] - 1).sum())
            rows += inputs
            computed += _cost(len(group), inputs, prefix, self.together)
            blocks = -(-len(group) // self.together)
            computed -= blocks * self.root * (1 - self.together / self.of_all.batch_size)

        return 1 - computed / rows

    def to_json(self, examples: Examples) -> dict:
        sizes = [len(group) for group in self.groups.members]
        tokens = float(np.average(self.groups.prefixes, weights=sizes))
        return {
            "tokens": tokens,
            "saved": self.saved(examples),
            "root": self.root,
            "groups": len(sizes),
        }

    def dataset(self, examples: Examples, sampler: Sampler) -> Dataset:
        blocks = GroupSampler(
            examples.lengths,
            self.of_all.batch_size,
            sampler.inputs,
            sampler.seed,
            groups=self.groups,
            together=self.together,
        )
        return Dataset(examples, self._collate(examples, blocks), blocks)

    def held_out(self, examples: Examples, max_seq_length: int, chosen: np.ndarray) -> Dataset:
        """Return the chosen examples, which the plan was made for, once."""
        inputs = sequence_inputs(max_seq_length)
        data = self.dataset(examples, Sampler(examples.lengths, self.of_all.batch_size, inputs))
        return dataclasses.replace(data, sampler=FixedOrder(data.sampler.epoch(0)))

    def _collate(self, examples: Examples, sampler: GroupSampler) -> GroupCollate:
        of_all = self.of_all
        prefixes = {0: of_all.prefix} | {prefix: prefix for prefix in self.groups.prefixes.tolist()}
        allowed = _few_shapes(examples, sampler, prefixes)

        trees = {}
        for key, prefix in prefixes.items():
            tokens = TokenCollate(of_all.batch_size, sampler.inputs, allowed.get(key), prefix)
            together = self.together if key else 0
            trees[key] = TreeCollate(tokens, None, together, of_all.least, root=self.root)
        return GroupCollate(trees[0].tokens, groups=self.groups, trees=trees)


def _few_shapes(
    examples: Examples, sampler: GroupSampler, prefixes: Mapping[int, int]
) -> dict[int, Collection[Shape]]:
    """Return few shapes for each prefix, one of which holds any batch; none if not compiled."""
    if not runtime.COMPILES:
        return {}

    groups = sampler.groups
    orders: dict[int, list[np.ndarray]] = defaultdict(list)
    for order in sampler.epoch(0):
        orders[groups.prefix_of(order)].append(order)

    few = {}
    for key, prefix in prefixes.items():
        members = groups.rest
        if key:
            parts = zip(groups.members, groups.prefixes, strict=True)
            members = np.concatenate([part for part, shared in parts if shared >= key])
        if len(members):
            collate = TokenCollate(sampler.batch_size, sampler.inputs, None, prefix)
            shapes = (collate.shape(examples, order) for order in orders[key])
            largest = collate.largest(examples.lengths[members])
            few[key] = joined_shapes(shapes, largest, sampler.batch_size)
    return few
