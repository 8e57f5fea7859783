"""Chains: examples that begin others, such as the turns of a chat cut into a row a turn.

The examples of a chain become one: its longest, whose targets are those of all of them. A target
counts once for each example that it is a target of, so that sums over targets, and their number,
are those of the examples apart. Tokens are computed once, in every model that is causal.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .encoding import Examples
from .token_store import Example

# Tokens of each example that are compared at a time.
_NARROWEST = 16
_WIDEST = 32
_ENDED = -1  # in place of tokens after the last one


class TokenOrder(NamedTuple):
    """Examples sorted by their tokens; an example that begins others comes before them."""

    indices: np.ndarray  # int64 [N]
    common: np.ndarray  # int64 [N], tokens that each begins with as the one before it does


def token_order(examples: Sequence[Example], chosen: np.ndarray) -> TokenOrder:
    """Equal examples stay in their order."""
    indices = np.array(chosen, dtype=np.int64)
    common = np.zeros(len(indices), dtype=np.int64)
    pending = [(0, len(indices), 0)] if len(indices) else []

    while pending:  # examples from start to stop are alike up to a token, and go on
        start, stop, at = pending.pop()
        width = min(max(at, _NARROWEST), _WIDEST)
        block = _columns(examples, indices[start:stop], at, width)
        if (block != block[0]).any():
            order = np.lexsort(block.T[::-1])
            indices[start:stop] = indices[start:stop][order]
            block = block[order]

        differing = block[1:] != block[:-1]
        is_new = differing.any(axis=1)
        alike = np.where(is_new, differing.argmax(axis=1), (block[1:] != _ENDED).sum(axis=1))
        common[start + 1 : stop] = at + alike

        edges = np.concatenate([[0], np.flatnonzero(is_new) + 1, [stop - start]])
        for first, end in zip(edges, edges[1:], strict=False):
            if end - first > 1 and block[first, -1] != _ENDED:
                pending.append((start + int(first), start + int(end), at + width))

    return TokenOrder(indices, common)


def _columns(examples: Sequence[Example], indices: np.ndarray, at: int, width: int) -> np.ndarray:
    """Return the tokens of examples from ``at``, [n, width]."""
    block = np.full((len(indices), width), _ENDED, dtype=np.int32)
    for row, i in zip(block, indices.tolist(), strict=True):
        part = examples[i].tokens[at : at + width]
        row[: len(part)] = part
    return block


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
