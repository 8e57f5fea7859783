"""Batches whose rows begin alike, and the same as trees: each beginning once (nn/prefix.py)."""

import dataclasses

import numpy as np

from mlx_packs.data.dataset import Batch, Tree
from mlx_packs.data.encoding import Example
from tests.helpers.steps import make_batch

PREFIX = 8


def examples_with_prefixes(
    lengths: tuple[int, ...], groups: int = 2, prefix: int = PREFIX, whole: bool = True
) -> list[Example]:
    """Random examples: of each group as many as there are lengths, which count what follows.

    whole: whether each token is a target, those of the prefix too; else only the last half are.
    """
    random = np.random.default_rng(1)
    examples = []
    for _ in range(groups):
        common = random.integers(1, 128, prefix)
        for length in lengths:
            tokens = np.concatenate([common, random.integers(1, 128, length)]).astype(np.int32)
            target = np.arange(len(tokens)) >= (1 if whole else len(tokens) - length // 2)
            examples.append(Example(tokens, target, "x"))
    return examples


def ordinary_batch(examples: list[Example]) -> Batch:
    """All examples, each in a padded row."""
    return make_batch(examples, range(len(examples)), len(examples), 64)


def tree_of(batch: Batch, groups: int, prefix: int = PREFIX) -> Batch:
    """The same batch with the beginning of each group of rows computed once."""
    tokens = batch.inputs["tokens"]
    rows, width = tokens.shape
    copies = rows // groups
    prefixes = tokens[::copies, :prefix]
    assert (np.repeat(prefixes, copies, axis=0) == tokens[:, :prefix]).all()

    row, place = np.divmod(batch.inputs["positions"], width)
    inside = row // copies * prefix + place
    after = groups * prefix + row * (width - prefix) + place - prefix
    positions = np.where(place < prefix, inside, after).astype(np.int32)
    tree = batch.having(prefix=prefixes, tokens=tokens[:, prefix:], positions=positions)
    return dataclasses.replace(tree, layout=Tree(groups, prefix))
