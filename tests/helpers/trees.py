"""Batches whose rows begin alike, and the same as trees: each beginning once (nn/prefix.py)."""

import mlx.nn as nn
import numpy as np

from mlx_packs import LoRAConfig
from mlx_packs.adapters.attach import attach
from mlx_packs.adapters.lora import Attached
from mlx_packs.data.dataset import Batch, Tree
from mlx_packs.data.encoding import Example
from mlx_packs.data.trees import planted
from mlx_packs.objectives.causal_lm import Head, split_head
from mlx_packs.runtime import mx
from tests.helpers.families import (
    NOT_SHARED,
    NOT_SHARED_RECOMPUTED,
    SEVERAL_CACHES,
    family_base,
    randomized,
    targets_of,
)
from tests.helpers.steps import loss_and_gradients, make_batch

PREFIX = 8

# A part of what the probe says of families that fall back to rows; families.py has the reasons.
FALLS_BACK = {"gear": "update_and_fetch", "gemma3n": "loss", "phi3small": "gradient"}
FALLS_BACK_RECOMPUTED = {"afm7": "does not take"}  # with recomputed blocks, besides those
assert (set(FALLS_BACK), set(FALLS_BACK_RECOMPUTED)) == (
    set(NOT_SHARED),
    set(NOT_SHARED_RECOMPUTED),
)
FALLS_BACK |= dict.fromkeys(SEVERAL_CACHES, "CacheList")


def examples_with_prefixes(
    lengths: tuple[int, ...],
    groups: int = 2,
    last: float | None = None,
    seed: int = 1,
    root: int = 0,
) -> list[Example]:
    """Random examples: of each group as many as there are lengths, which count what follows.

    last: the share of what follows whose tokens are targets, at least one; None is every token,
        those of the prefix too.
    root: tokens that all of them begin with.
    """
    random = np.random.default_rng(seed)
    first = np.random.default_rng(seed + 1).integers(1, 128, root)
    examples = []
    for _ in range(groups):
        common = np.concatenate([first, random.integers(1, 128, PREFIX)])
        for length in lengths:
            tokens = np.concatenate([common, random.integers(1, 128, length)]).astype(np.int32)
            count = len(tokens) - 1 if last is None else max(1, round(last * length))
            target = np.arange(len(tokens)) >= len(tokens) - count
            examples.append(Example(tokens, target, "x"))
    return examples


def ordinary_batch(examples: list[Example]) -> Batch:
    """All examples, each in a padded row."""
    return make_batch(examples, range(len(examples)), len(examples), 64)


def tree_of(batch: Batch, groups: int, prefix: int = PREFIX, root: int = 0) -> Batch:
    """The same batch with the beginning of each group of rows computed once, and that of all."""
    return planted(batch, Tree(groups, prefix, root=root))


BATCH = ordinary_batch(examples_with_prefixes((5, 11, 7)))  # two groups of three rows


def check_equal(
    model: nn.Module,
    head: Head | None,
    batch: Batch = BATCH,
    groups: int = 2,
    root: int = 0,
    half: float = 2e-6,
):
    """Loss within 1e-6; gradients within 2e-5 of each one's largest entry, and half of them closer.

    Half are within 1e-6 in most families; in gemma4 and jamba the rows of a batch, each alone, are
    2.2e-6 from the batch.
    """
    loss, gradients = loss_and_gradients(model, head, [tree_of(batch, groups, root + PREFIX, root)])
    expected_loss, expected = loss_and_gradients(model, head, [batch])
    assert abs(loss / expected_loss - 1) < 1e-6
    assert set(gradients) == set(expected)

    differences = []
    for name, tensor in expected.items():
        largest = mx.abs(tensor).max().item()
        difference = mx.abs(gradients[name] - tensor).max().item()
        assert largest > 0 or difference == 0, name  # no key of afm7's first block gets a gradient
        if largest > 0:
            differences.append(difference / largest)
    assert len(differences) > len(expected) / 2 and max(differences) < 2e-5
    assert np.median(differences) < half


def adapted_family(family: str, policy: str = "none") -> tuple[Attached, Head | None]:
    """A small model of any family, with adapters on its experts too that are not zero."""
    base = family_base(family)
    attached = attach(base, LoRAConfig(rank=2, target_modules=targets_of(base, 2)))
    randomized(attached)
    attached.recompute(policy)
    head = split_head(base.model)
    base.model.train()
    return attached, head
