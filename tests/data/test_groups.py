"""Examples of many groups that begin alike are put together, each once in an epoch."""

import itertools
from collections import Counter

import numpy as np
import pytest

from mlx_packs import runtime
from mlx_packs.data.batches import TokenCollate, training_set
from mlx_packs.data.encoding import Example, Examples
from mlx_packs.data.groups import GroupPlan, find_groups, token_order
from mlx_packs.data.sampler import Sampler
from mlx_packs.data.trees import TreePlan, felled
from tests.data.test_trees import inputs_of

LIMIT = 4096


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


def same_inputs(pieces, batch) -> bool:
    """Whether pieces together have the inputs of each target of a batch."""
    apart = [(path, target) for piece in pieces for path, target, _ in inputs_of(piece)]
    return sorted(apart) == sorted((path, target) for path, target, _ in inputs_of(batch))


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


@pytest.mark.parametrize("batch_size", [2, 7])
def test_a_batch_without_blocks_of_two_rows_has_no_groups(batch_size):
    examples = documents([8, 8], 64)
    assert GroupPlan.of(examples, np.arange(16), TreePlan(batch_size)) is None


def test_groups_are_the_questions_on_a_document():
    examples = documents([6, 4, 1, 1], 64, instruction=24)
    groups = groups_of(examples, 4)
    assert sorted(map(len, groups.members)) == [4, 6] and len(groups.rest) == 2
    assert (groups.prefixes >= 88).all()
    for own, prefix in zip(groups.members, groups.prefixes, strict=True):
        assert len({tuple(examples[i].tokens[:prefix]) for i in own}) == 1
    assert (groups.numbers[groups.rest] == -1).all()


def test_what_all_begin_with_is_one_group_if_nothing_longer_repeats():
    groups = groups_of(documents([1] * 8, 20, instruction=40), 4)
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
        assert inputs_of(batch) == inputs_of(rows)
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
