"""Packed trees have the inputs and targets of packed rows, each after the prefix."""

import numpy as np
import pytest

from mlx_packs import runtime
from mlx_packs.data.batches import PackedCollate
from mlx_packs.data.packed_trees import PackedTreeCollate, packed_trees
from mlx_packs.data.packing import Packed, aligned_batches, first_fit
from mlx_packs.data.sampler import Sampler
from mlx_packs.data.trees import Steps, TreePlan
from tests.data.test_trees import examples_of

LIMIT = 128
PREFIX = 32
EXAMPLES = examples_of(50, 61, 44, 55, 33, 70)  # of 33 tokens, the last is no input


def order_of(aligned: bool) -> Packed:
    inputs = EXAMPLES.lengths - 1
    if aligned:
        (packed,) = aligned_batches(inputs, 4, LIMIT, np.random.default_rng(0))
        return packed
    return Packed(first_fit(inputs, np.arange(len(EXAMPLES)), LIMIT))


def targets_of(batch) -> list[tuple]:
    """For each target what precedes it in its example, itself, and the example."""
    inputs, examples = batch.inputs, batch.examples
    flat = inputs["tokens"].reshape(-1).tolist()
    prefix = inputs["prefix"][0].tolist() if "prefix" in inputs else []

    found = []
    for at, target, owner in zip(
        *(inputs[n].tolist() for n in ("positions", "targets", "owners")), strict=True
    ):
        if owner < 0:
            continue

        path = prefix[: at + 1]
        if at >= len(prefix):
            path = prefix + flat[batch.starts[owner] : at - len(prefix) + 1]
        found.append((tuple(path), target, examples[owner]))

    return sorted(found)


@pytest.mark.parametrize("aligned", [False, True])
def test_a_packed_tree_has_the_inputs_and_targets_of_its_rows(aligned):
    packed = PackedCollate(4, LIMIT)
    order = order_of(aligned)
    rows = packed(EXAMPLES, order)
    tree = PackedTreeCollate(packed, PREFIX)(EXAMPLES, order)
    assert targets_of(tree) == targets_of(rows) and tree.targets == rows.targets
    assert tree.inputs["prefix"].shape == (1, PREFIX) and "segments" not in tree.inputs
    (spans,) = tree.layout.spans
    assert tree.inputs["tokens"].shape == (1, sum(spans))
    assert list(spans) == sorted(spans, reverse=True) and spans[-1] >= 1
    if not aligned:
        lengths = [len(EXAMPLES[i].tokens) - 1 - PREFIX for i in tree.examples]
        assert list(spans) == [max(length, 1) for length in lengths]


@pytest.mark.parametrize("parts", [1, 4, 50])
@pytest.mark.parametrize("aligned", [False, True])
def test_pieces_of_a_packed_tree_add_up_to_it(aligned, parts):
    collate = PackedTreeCollate(PackedCollate(4, LIMIT), PREFIX, once=True)
    tree = collate(EXAMPLES, order_of(aligned))
    pieces = collate.split(tree, parts)
    assert len(pieces) == min(parts, 6) or parts == 4
    assert sum((piece.examples for piece in pieces), ()) == tree.examples
    assert sorted(sum((targets_of(piece) for piece in pieces), [])) == targets_of(tree)
    assert sum(piece.targets for piece in pieces) == tree.targets
    assert all(piece.layout.recurs and piece.layout.prefix == PREFIX for piece in pieces)
    assert sum((piece.layout.spans[0] for piece in pieces), ()) == tree.layout.spans[0]


def test_packed_trees_have_whole_tiles_on_a_gpu(monkeypatch):
    collate = PackedTreeCollate(PackedCollate(4, LIMIT), PREFIX)
    order = order_of(aligned=True)
    rows = collate(EXAMPLES, order)
    monkeypatch.setattr(runtime, "COMPILES", True)
    tree = collate(EXAMPLES, order)
    pieces = collate.split(tree, 2)
    assert targets_of(tree) == targets_of(rows)
    assert sorted(sum((targets_of(piece) for piece in pieces), [])) == targets_of(rows)
    for batch in (tree, *pieces):
        inputs = batch.inputs["tokens"].size
        assert inputs % 32 == 0 and inputs == sum(batch.layout.spans[0])


@pytest.mark.parametrize("steps", [None, Steps(1, 1), Steps(2, 1)])
def test_an_epoch_of_packed_trees_has_every_example_once(steps):
    plan = TreePlan.of(EXAMPLES, np.arange(6), 4, 0, 0.0, steps)
    sampler = Sampler(EXAMPLES.lengths, 2, LIMIT, packing=True)
    dataset = packed_trees(plan, EXAMPLES, sampler)
    batches = dataset.once()
    assert sorted(i for batch in batches for i in batch.examples) == list(range(6))
    assert {batch.layout.recurs for batch in batches} == {steps == Steps(2, 1)}
    assert dataset.collate.once == (steps is not None)


@pytest.mark.parametrize("aligned", [False, True])
def test_the_shape_of_a_packed_tree_is_known_before_it_is_laid_out(aligned):
    """Spans that are shorter than the prefix keep an input each."""
    collate = PackedTreeCollate(PackedCollate(4, LIMIT), PREFIX)
    order = order_of(aligned)
    (shape,) = collate.shapes(EXAMPLES, iter([order]))
    batch = collate(EXAMPLES, order)
    assert shape.rows(4) == len(EXAMPLES) and shape.prefix == PREFIX
    assert shape.computed(4) == pytest.approx(PREFIX + batch.inputs["tokens"].size, abs=4)
    assert shape.targets == len(batch.inputs["targets"])
