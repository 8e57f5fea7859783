"""Trees are batches of rows, whose common beginning is there once."""

import numpy as np
import pytest

from mlx_packs.data.batches import TokenCollate
from mlx_packs.data.dataset import Tree
from mlx_packs.data.encoding import Example, Examples
from mlx_packs.data.sampler import Sampler
from mlx_packs.data.trees import (
    TreeCollate,
    TreePlan,
    common_inputs,
    felled,
    planted,
    prefix_of,
    root_of,
)

SHARED = np.arange(100, 140)


def examples_of(*lengths: int, common: int = 35) -> Examples:
    """Examples that begin with the same tokens and then differ; the last half are targets."""
    items = []
    for i, length in enumerate(lengths):
        own = 1000 * (i + 1) + np.arange(length - common)
        tokens = np.concatenate([SHARED[:common], own]).astype(np.int32)
        items.append(Example(tokens, np.arange(length) >= length // 2, f"row {i}"))
    return Examples(items, "chat", "assistant")


def inputs_of(batch) -> set[tuple]:
    """The token and everything before it that predicts each target, with the target and its owner."""
    inputs = batch.inputs
    tokens = inputs["tokens"]

    root = tuple(inputs["root"][0]) if "root" in inputs else ()
    prefixes = [(*root, *row) for row in inputs.get("prefix", ())]
    together = len(tokens) // len(prefixes) if prefixes else 0
    rows = [
        (prefixes[i // together] if prefixes else (), tuple(row)) for i, row in enumerate(tokens)
    ]
    parts = [((), root), *((root, row[len(root) :]) for row in prefixes), *rows]
    paths = [(*before, *own[: at + 1]) for before, own in parts for at in range(len(own))]

    real = inputs["owners"] >= 0
    columns = (inputs[name][real].tolist() for name in ("positions", "targets", "owners"))
    return [(paths[at], target, owner) for at, target, owner in zip(*columns, strict=True)]


@pytest.mark.parametrize(
    ("lengths", "common", "expected"),
    [((50, 60, 45), 35, 32), ((50, 60), 40, 40), ((50, 60), 15, 0), ((35, 60), 35, 32)]
    + [((20, 60), 20, 16), ((16, 60), 16, 0), ((50,), 35, 48)],
)
def test_the_common_beginning_is_cut_to_a_multiple_of_eight(lengths, common, expected):
    assert prefix_of(common_inputs(examples_of(*lengths, common=common).items)) == expected


@pytest.mark.parametrize(("together", "root"), [(0, 0), (2, 0), (2, 16)])
@pytest.mark.parametrize("rows", [4, 6])
def test_a_tree_has_the_inputs_and_targets_of_its_rows(together, root, rows):
    """Of six rows two are without an example; some targets are inside the prefix."""
    examples = examples_of(50, 61, 44, 55)
    ordinary = TokenCollate(rows, 96, prefix=32)(examples, range(4))
    groups = rows // together if together else 1
    tree = planted(ordinary, Tree(groups, 32, root=root))
    assert inputs_of(tree) == inputs_of(ordinary)
    assert tree.inputs["prefix"].shape == (groups, 32 - root)
    assert ("root" in tree.inputs) == (root > 0)
    assert tree.inputs["tokens"].shape == (rows, ordinary.inputs["tokens"].shape[1] - 32)
    assert (tree.inputs["positions"] < root + groups * (32 - root)).any()
    back = felled(tree)
    assert inputs_of(back) == inputs_of(ordinary) and set(back.inputs) == set(ordinary.inputs)


def test_pieces_of_a_tree_add_up_to_it_and_are_trees_where_that_saves_enough():
    examples = examples_of(50, 61, 44, 55)
    collate = TreeCollate(TokenCollate(4, 96, prefix=32))
    tree = collate(examples, range(4))
    assert tree.inputs["prefix"].shape == (1, 32)
    halves = collate.split(tree, 2)
    assert [half.inputs["prefix"].shape for half in halves] == [(1, 32), (1, 32)]
    quarters = collate.split(tree, 4)
    assert all("prefix" not in quarter.inputs for quarter in quarters)
    for pieces in (halves, quarters):
        assert sum(piece.targets for piece in pieces) == tree.targets
        assert sum((piece.examples for piece in pieces), ()) == tree.examples
        found = [(path, target) for piece in pieces for path, target, _ in inputs_of(piece)]
        assert sorted(found) == sorted((path, target) for path, target, _ in inputs_of(tree))


@pytest.mark.parametrize(("rows", "saved"), [(4, 3 / 4), (1, 0)])
def test_the_prefix_of_a_batch_counts_once(rows, saved):
    examples = examples_of(50, 61, 44, 55)
    plan = TreePlan.of(examples, np.arange(4), rows, 0, 0.0)
    inputs = examples.lengths.mean() - 1
    assert plan.saved(examples) == pytest.approx(saved * 32 / inputs)
    collate = plan.collate(examples, Sampler(examples.lengths, rows, 96))
    assert collate(examples, np.arange(rows)).layout == (Tree(1, 32) if rows > 1 else ())
    held_out = plan.held_out(examples, 96, np.arange(4))
    assert {batch.layout for batch in held_out.once()} == {Tree(1, 32) if rows > 1 else ()}


def test_groups_share_what_each_of_them_begins_with():
    """Two pairs of one beginning each, of 35 and 28 tokens, and what is common to all is 20."""
    first, second = examples_of(50, 61, common=35).items, examples_of(44, 55, common=28).items
    other = [
        Example(np.concatenate([e.tokens[:20], e.tokens[20:] + 5]), e.target, e.where)
        for e in second
    ]
    examples = Examples([*first, *other], "chat", "assistant")
    plan = TreePlan.of(examples, np.arange(4), 4, 2, 0.0)
    assert plan.together == 2 and plan.common.tolist() == [35, 28]

    collate = TreeCollate(TokenCollate(4, 96), plan.common, 2)
    batch = collate(examples, np.arange(4))
    assert batch.inputs["prefix"].shape == (2, 24)
    assert inputs_of(batch) == inputs_of(TokenCollate(4, 96)(examples, np.arange(4)))
    assert collate(examples, np.array([0, 1])).inputs["prefix"].shape == (2, 32)
    pieces = collate.split(batch, 2)
    assert [piece.inputs["prefix"].shape for piece in pieces] == [(1, 24), (1, 24)]


@pytest.mark.parametrize(("common", "root"), [(48, 48), (15, 0)])
def test_pairs_that_begin_alike_have_a_level_before_their_prefixes(common, root):
    random = np.random.default_rng(0)
    items = []
    first = random.integers(1, 5000, common)
    for i in range(8):
        if i % 2 == 0:
            prompt = random.integers(1, 5000, 32)
        tokens = np.concatenate([first, prompt, random.integers(1, 5000, 24)]).astype(np.int32)
        items.append(Example(tokens, np.arange(len(tokens)) >= len(tokens) - 20, f"row {i}"))
    examples = Examples(items, "preference", "completion")

    plan = TreePlan.of(examples, np.arange(8), 8, together=2, least=0.0)
    assert plan.root == root and plan.to_json(examples)["root"] == root
    collate = plan.collate(examples, Sampler(examples.lengths, 8, 256))
    batch = collate(examples, np.arange(8))
    assert batch.layout.root == root and batch.layout.groups == 4
    (shape,) = collate.shapes(examples, iter([np.arange(8)]))
    assert shape[1] == len(batch.inputs["targets"])
    names = batch.inputs.keys() & {"root", "prefix", "tokens"}
    assert shape.root == root and shape.computed(8) == sum(batch.inputs[n].size for n in names)
    assert inputs_of(batch) == inputs_of(TokenCollate(8, 256)(examples, np.arange(8)))


@pytest.mark.parametrize(
    ("common", "groups", "prefix", "expected"),
    [(48, 4, 80, 48), (44, 4, 80, 40), (24, 4, 80, 24), (16, 4, 80, 0), (48, 1, 80, 0)],
)
def test_a_level_before_prefixes_saves_a_tenth_of_what_is_computed(
    common, groups, prefix, expected
):
    assert root_of(common, (8, prefix + 24), groups, prefix) == expected
