"""Trees are batches of rows whose common beginning is there once; groups are put into them."""

import itertools
from collections import Counter

import numpy as np
import pytest

from mlx_packs import runtime
from mlx_packs.data.batches import TokenCollate, training_set
from mlx_packs.data.dataset import Tree
from mlx_packs.data.encoding import Example, Examples
from mlx_packs.data.groups import GroupPlan, find_groups, token_order
from mlx_packs.data.sampler import Sampler
from mlx_packs.data.trees import TreeCollate, TreePlan, common_inputs, felled, prefix_of

LIMIT = 4096
SHARED = np.arange(100, 140)


def beginning_alike(*lengths: int, common: int = 35) -> Examples:
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


def same_inputs(pieces, batch) -> bool:
    """Whether pieces together have the inputs of each target of a batch."""
    apart = [(path, target) for piece in pieces for path, target, _ in inputs_of(piece)]
    return sorted(apart) == sorted((path, target) for path, target, _ in inputs_of(batch))


@pytest.mark.parametrize(
    ("lengths", "common", "expected"),
    [
        ((50, 60, 45), 35, 32),
        ((50, 60), 15, 0),
        ((20, 60), 20, 16),
        ((16, 60), 16, 0),
        ((50,), 35, 48),
    ],
)
def test_the_common_beginning_is_cut_to_a_multiple_of_eight(lengths, common, expected):
    assert prefix_of(common_inputs(beginning_alike(*lengths, common=common).items)) == expected


def test_pieces_of_a_tree_add_up_to_it_and_are_trees_where_that_saves_enough():
    examples = beginning_alike(50, 61, 44, 55)
    collate = TreeCollate(TokenCollate(4, 96, prefix=32))
    tree = collate(examples, range(4))
    for parts, layout in ((2, Tree(1, 32)), (4, ())):
        pieces = collate.split(tree, parts)
        assert {piece.layout for piece in pieces} == {layout}
        assert sum((piece.examples for piece in pieces), ()) == tree.examples
        assert same_inputs(pieces, tree)


@pytest.mark.parametrize(("rows", "saved"), [(4, 3 / 4), (1, 0)])
def test_the_prefix_of_a_batch_counts_once(rows, saved):
    examples = beginning_alike(50, 61, 44, 55)
    plan = TreePlan.of(examples, np.arange(4), rows, 0, 0.0)
    inputs = examples.lengths.mean() - 1
    assert plan.saved(examples) == pytest.approx(saved * 32 / inputs)
    collate = plan.collate(examples, Sampler(examples.lengths, rows, 96))
    assert collate(examples, np.arange(rows)).layout == (Tree(1, 32) if rows > 1 else ())
    held_out = plan.held_out(examples, 96, np.arange(4))
    assert {batch.layout for batch in held_out.once()} == {Tree(1, 32) if rows > 1 else ()}


def test_groups_share_what_each_of_them_begins_with():
    """Two pairs of one beginning each, of 35 and 28 tokens, and what is common to all is 20."""
    first = beginning_alike(50, 61, common=35).items
    second = beginning_alike(44, 55, common=28).items
    other = [Example(np.r_[e.tokens[:20], e.tokens[20:] + 5], e.target, "x") for e in second]
    examples = Examples([*first, *other], "chat", "assistant")
    plan = TreePlan.of(examples, np.arange(4), 4, 2, 0.0)
    assert plan.together == 2 and plan.common.tolist() == [35, 28]

    collate = TreeCollate(TokenCollate(4, 96), plan.common, 2)
    batch = collate(examples, np.arange(4))
    assert batch.inputs["prefix"].shape == (2, 24)
    rows = inputs_of(TokenCollate(4, 96)(examples, np.arange(4)))
    assert inputs_of(batch) == inputs_of(felled(batch)) == rows
    assert collate(examples, np.array([0, 1])).inputs["prefix"].shape == (2, 32)
    pieces = collate.split(batch, 2)
    assert [piece.inputs["prefix"].shape for piece in pieces] == [(1, 24), (1, 24)]


@pytest.mark.parametrize(("common", "root"), [(48, 48), (44, 40), (15, 0)])
def test_pairs_that_begin_alike_have_a_level_before_their_prefixes(common, root):
    first = np.arange(common)
    prompts = [np.arange(1000 * (i // 2), 1000 * (i // 2) + 32) + 100 for i in range(8)]
    tokens = [
        np.r_[first, prompt, 9000 + 30 * i : 9024 + 30 * i] for i, prompt in enumerate(prompts)
    ]
    items = [
        Example(each.astype(np.int32), np.arange(len(each)) >= common + 36, "x") for each in tokens
    ]
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


def documents(
    questions: list[int], document: int, own: int = 12, instruction: int = 0, seed: int = 0
) -> Examples:
    """Of each document as many examples as it has questions, of like lengths, in random order.

    All begin with an instruction; the last four tokens are targets.
    """
    random = np.random.default_rng(seed)
    first = random.integers(1, 5000, instruction)
    tokens = []
    for count in questions:
        text = random.integers(1, 5000, document + random.integers(0, document // 8 + 1))
        for _ in range(count):
            question = random.integers(1, 5000, own + random.integers(0, 4))
            tokens.append(np.concatenate([first, text, question]).astype(np.int32))

    items = []
    for i in random.permutation(len(tokens)):
        target = np.arange(len(tokens[i])) >= len(tokens[i]) - 4
        items.append(Example(tokens[i], target, f"row {i}"))
    return Examples(items, "completion", "completion")


def groups_of(examples: Examples, together: int):
    return find_groups(examples, token_order(examples, np.arange(len(examples))), together)


def plan_of(examples: Examples, batch_size: int, prefix: int = 0) -> GroupPlan:
    of_all = TreePlan(batch_size, prefix, least=0.0)
    plan = GroupPlan.of(examples, np.arange(len(examples)), of_all)
    assert plan is not None
    return plan


def data_of(examples: Examples, batch_size: int, seed: int = 0, prefix: int = 0):
    return plan_of(examples, batch_size, prefix).dataset(
        examples, Sampler(examples.lengths, batch_size, LIMIT, seed)
    )


def computed(batch) -> int:
    """Inputs that a batch computes, padding included."""
    names = batch.inputs.keys() & {"root", "prefix", "tokens"}
    return sum(batch.inputs[name].size for name in names)


@pytest.mark.parametrize(("questions", "expected"), [(4, 4), (6, 8), (8, 8), (20, 8)])
def test_blocks_have_the_size_that_saves_most(questions, expected):
    assert plan_of(documents([questions] * 6, 200), 16).together == expected
    for batch_size in (2, 7):  # without blocks of two rows
        assert GroupPlan.of(documents([8, 8], 64), np.arange(16), TreePlan(batch_size)) is None


def test_groups_are_the_questions_on_a_document():
    examples = documents([6, 4, 1, 1], 64, instruction=24)
    groups = groups_of(examples, 4)
    assert sorted(map(len, groups.members)) == [4, 6] and len(groups.rest) == 2
    assert (groups.prefixes >= 88).all()
    for own, prefix in zip(groups.members, groups.prefixes, strict=True):
        assert len({tuple(examples[i].tokens[:prefix]) for i in own}) == 1
    assert (groups.numbers[groups.rest] == -1).all()
    groups = groups_of(documents([1] * 8, 20, instruction=40), 4)  # nothing longer repeats
    assert [len(own) for own in groups.members] == [8] and groups.prefixes.tolist() == [40]


@pytest.mark.parametrize(
    ("questions", "batch_size"), [([8] * 5, 8), ([7, 5, 3, 9, 1, 1, 2, 1], 8), ([20, 3, 4], 6)]
)
def test_every_epoch_has_each_example_once_in_as_many_batches(questions, batch_size):
    examples = documents(questions, 64)
    data = data_of(examples, batch_size)
    epochs = [data.sampler.epoch(number) for number in range(3)]
    for epoch in epochs:
        assert len(epoch) == data.batches_per_epoch() == len(epochs[0])
        indices = np.concatenate(epoch)
        assert sorted(indices[indices >= 0]) == list(range(len(examples)))
        assert all(len(order) <= batch_size for order in epoch)
    assert not all(np.array_equal(*pair) for pair in zip(*epochs[:2], strict=True))


def test_batches_are_a_function_of_seed_and_number():
    data = data_of(documents([7, 5, 3, 9, 1, 2, 1], 64), 8)
    count = data.batches_per_epoch()
    orders = list(itertools.islice(data.sampler.batches(), 3 * count))
    for start in (1, count, 2 * count + 1):
        again = itertools.islice(data.sampler.batches(start), 3 * count - start)
        assert all(map(np.array_equal, again, orders[start:]))
    other = data_of(data.examples, 8, seed=1).sampler.epoch(0)
    assert not all(map(np.array_equal, other, orders))


def test_the_blocks_of_a_batch_are_of_different_groups():
    """Also where one group has most of the blocks of an epoch, as long as others are left."""
    for questions in ([8] * 6, [24, 8, 8, 8], [4, 4, 4, 12, 8, 8]):
        data = data_of(documents(questions, 64), 8)
        for number in range(4):
            for order in data.sampler.epoch(number):
                numbers = data.collate.groups.numbers[order].reshape(2, 4)
                assert numbers[0, 0] != numbers[1, 0]
                assert (numbers == numbers[:, :1]).all()


@pytest.mark.parametrize("questions", [[8] * 4, [7, 5, 3, 9, 1, 1, 2, 1]])
@pytest.mark.parametrize("compiles", [False, True])
def test_trees_of_groups_have_the_inputs_and_targets_of_their_rows(
    questions, compiles, monkeypatch
):
    monkeypatch.setattr(runtime, "COMPILES", compiles)
    data = data_of(documents(questions, 64), 8)
    tokens = TokenCollate(8, LIMIT)
    trees = 0

    for order, batch in zip(data.sampler.epoch(0), data.once(), strict=True):
        rows = tokens(data.examples, order[order >= 0])
        assert inputs_of(batch) == inputs_of(rows)
        assert batch.examples == rows.examples and batch.targets == rows.targets
        if batch.layout:
            trees += 1
            assert batch.layout.groups == 2 and batch.layout.prefix >= 64
            back = felled(batch)
            assert inputs_of(back) == inputs_of(rows) and set(back.inputs) == set(rows.inputs)

    assert trees >= 3


def test_what_all_documents_have_in_common_is_a_level_of_its_own():
    examples = documents([8, 8, 6, 5, 1, 1], 64, instruction=80)
    plan = plan_of(examples, 8, 80)
    assert plan.root == 80
    assert plan.saved(examples) > plan_of(examples, 8).saved(examples) + 0.09

    data = data_of(examples, 8, prefix=80)
    rooted = 0
    for order, batch in zip(data.sampler.epoch(0), data.once(), strict=True):
        rows = TokenCollate(8, LIMIT)(data.examples, order[order >= 0])
        assert inputs_of(batch) == inputs_of(felled(batch)) == inputs_of(rows)
        assert same_inputs(data.collate.split(batch, 2), batch)
        if batch.layout and batch.layout.groups > 1:
            assert batch.inputs["root"].shape == (1, 80)
            rooted += 1

    assert rooted >= 3


@pytest.mark.parametrize("parts", [2, 8])
def test_pieces_of_blocks_add_up_to_the_batch(parts):
    data = data_of(documents([7, 5, 3, 9, 1, 1, 2, 1], 64), 8)
    for batch in data.once():
        pieces = data.collate.split(batch, parts)
        assert 1 < len(pieces) <= parts
        assert sum(piece.targets for piece in pieces) == batch.targets
        assert sum((piece.examples for piece in pieces), ()) == batch.examples
        assert same_inputs(pieces, batch)
        if batch.layout and parts < 5:
            assert all(piece.layout for piece in pieces)


def test_compiled_batches_have_few_shapes_that_hold_later_epochs(monkeypatch):
    monkeypatch.setattr(runtime, "COMPILES", True)
    random = np.random.default_rng(3)
    questions = random.integers(1, 12, 60).tolist()
    parts = [documents(questions[i::6], 64 + 40 * i, own=8 + 10 * i, seed=i) for i in range(6)]
    data = data_of(Examples.joined(parts), 8)
    shapes = Counter()
    for number in range(4):
        for order in data.sampler.epoch(number):
            batch = data.collate(data.examples, order)
            shapes[batch.layout, batch.inputs["tokens"].shape, batch.inputs["targets"].shape] += 1
    assert len(shapes) < 24


# Two rows of the table of benchmarks/guides.md: by documents, questions on each, their tokens, and
# those of an instruction before them.
PAGE = {
    (120, 4, 800, 60, 0): (0.70, 0.70),
    (60, 5, 1500, 60, 500): (0.62, 0.76),
}


@pytest.mark.parametrize("sizes", PAGE)
def test_the_page_has_the_shares_that_batches_save(sizes):
    count, questions, document, own, instruction = sizes
    examples = documents([questions] * count, document, own, instruction)
    for batch_size, expected in zip((8, 16), PAGE[sizes], strict=True):
        of_all = TreePlan.of(examples, np.arange(len(examples)), batch_size, 0, 0.0)
        plan = plan_of(examples, batch_size, of_all.prefix)
        sampler = Sampler(examples.lengths, batch_size, LIMIT)
        trees = sum(map(computed, plan.dataset(examples, sampler).once()))
        saved = 1 - trees / sum(map(computed, training_set(examples, sampler).once()))
        assert saved == pytest.approx(expected, abs=0.006)
        assert plan.saved(examples) == pytest.approx(saved, abs=0.03)


def test_held_out_examples_are_evaluated_once_each():
    examples = documents([7, 5, 3, 9, 1], 64)
    chosen = np.arange(1, 25)
    plan = GroupPlan.of(examples, chosen, TreePlan(8, least=0.0))
    batches = plan.held_out(examples, LIMIT + 1, chosen).once()
    assert sorted(i for batch in batches for i in batch.examples) == chosen.tolist()
    assert any(batch.layout for batch in batches)
