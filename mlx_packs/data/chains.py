"""Chains: examples that begin others, such as the turns of a chat cut into a row a turn.

The examples of a chain become one: its longest, whose targets are those of all of them. A target
counts once for each example that it is a target of, so that sums over targets, and their number,
are those of the examples apart. Tokens are computed once, in every model that is causal.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from .encoding import Examples
from .token_order import TokenOrder, token_order
from .token_store import Example


class MergedExamples(Sequence):
    """Chains of examples as one example each, made on access.

    ``chains`` has the indices of each, from its longest example to its shortest.
    """

    def __init__(self, items: Sequence[Example], chains: Sequence[Sequence[int]]) -> None:
        self._items = items
        self._members = np.array([i for chain in chains for i in chain], dtype=np.int64)
        self._edges = np.cumsum([0, *map(len, chains)])

    def __len__(self) -> int:
        return len(self._edges) - 1

    def __getitem__(self, i: int) -> Example:
        i = range(len(self))[i]
        longest, *shorter = self._members[self._edges[i] : self._edges[i + 1]].tolist()
        example = self._items[longest]
        if not shorter:
            return example

        counts = example.target.astype(np.int32)
        for each in shorter:
            target = self._items[each].target
            counts[: len(target)] += target
        return Example(example.tokens, counts, example.where)


def merged(examples: Examples) -> Examples:
    """Return each chain as one example, in the order of their longest ones.

    Equal examples stay apart, in chains of their own.
    """
    order = token_order(examples, np.arange(len(examples)))
    chains = sorted(_chains(examples, order), key=lambda chain: chain[0])
    rows = len(examples) - len(chains)
    if not rows:
        return examples

    longest = np.array([chain[0] for chain in chains])
    lengths = examples.lengths[longest]
    inputs = int((examples.lengths - 1).sum() - (lengths - 1).sum())
    items = MergedExamples(examples.items, chains)
    whole = dataclasses.replace(examples, items=items, merged=rows, merged_inputs=inputs)
    whole.lengths = lengths
    whole.target_counts = np.array(
        [int(examples.target_counts[chain].sum()) for chain in chains], dtype=np.int64
    )
    return whole


def merged_share(examples: Examples) -> float:
    """Return the share of all inputs that merging saves."""
    computed = int((examples.lengths - 1).sum())
    return examples.merged_inputs / max(computed + examples.merged_inputs, 1)


def _chains(examples: Sequence[Example], order: TokenOrder) -> list[list[int]]:
    """Return chains with every example once, each from its longest to its shortest."""
    chains: list[list[int]] = []
    ends: list[int] = []  # a stack of chains, whose last examples are sorted: the smallest on top
    stop = len(order.indices)

    while stop:
        start = _first_of_equals(examples, order, stop - 1)
        equals = order.indices[start:stop].tolist()
        shorter = examples[equals[0]].tokens

        open_chains: list[int] = []
        while ends and len(open_chains) < len(equals):
            longer = examples[chains[ends[-1]][-1]].tokens
            if not np.array_equal(longer[: len(shorter)], shorter):
                break
            open_chains.append(ends.pop())

        for i in equals:
            if open_chains:
                number = open_chains.pop()
                chains[number].append(i)
            else:
                number = len(chains)
                chains.append([i])
            ends.append(number)
        stop = start

    return chains


def _first_of_equals(examples: Sequence[Example], order: TokenOrder, last: int) -> int:
    """Return the place of the first example that equals the one at ``last``."""
    length = len(examples[int(order.indices[last])].tokens)
    first = last
    while first and order.common[first] == length:
        if len(examples[int(order.indices[first - 1])].tokens) != length:
            break
        first -= 1

    return first
