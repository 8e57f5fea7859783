"""Examples that begin others are merged into them, with the targets of all."""

import numpy as np
import pytest

from mlx_packs.data.batches import TokenCollate, few_shapes
from mlx_packs.data.chains import merged, token_order
from mlx_packs.data.encoding import Example, Examples
from mlx_packs.data.sampler import Sampler


def example(tokens, targets=(), where="x") -> Example:
    target = np.isin(np.arange(len(tokens)), [i % len(tokens) for i in targets])
    return Example(np.array(tokens, np.int32), target, where)


def examples_of(*items: Example) -> Examples:
    return Examples(list(items), "chat", "assistant")


def random_examples(seed: int, count: int = 60) -> Examples:
    """Many begin alike, some begin others, some are equal: of two tokens each, or of long runs."""
    random = np.random.default_rng(seed)
    stems = [random.integers(0, 2, 50) for _ in range(3)]
    items = []
    for _ in range(count):
        stem = stems[random.integers(3)][: random.integers(0, 51)]
        tokens = np.concatenate([stem, random.integers(0, 2, random.integers(2, 4))])
        items.append(example(tokens, random.integers(1, len(tokens), 2)))
    return examples_of(*items)


def targets_of(examples) -> list[tuple]:
    """Everything before each target with the target, once for each time that it counts."""
    return sorted(
        tuple(own.tokens[: at + 1].tolist())
        for own in examples
        for at in np.repeat(np.arange(len(own.tokens)), own.target)
    )


@pytest.mark.parametrize("seed", range(2))
def test_examples_are_sorted_by_their_tokens(seed):
    examples = random_examples(seed)
    order = token_order(examples, np.arange(len(examples)))
    tokens = [e.tokens.tolist() for e in examples.items]
    assert order.indices.tolist() == sorted(range(len(tokens)), key=lambda i: (tokens[i], i))
    for before, after, common in zip(
        order.indices, order.indices[1:], order.common[1:], strict=False
    ):
        pairs = zip(tokens[before], tokens[after], strict=False)
        differing = [i for i, (one, other) in enumerate(pairs) if one != other]
        shortest = min(len(tokens[before]), len(tokens[after]))
        assert common == (differing[0] if differing else shortest)


def test_the_turns_of_a_chat_become_one_example():
    """The first answer is a target of all three rows, the second one of two."""
    turns = [example(range(4), (2, 3), "a"), example(range(8), (2, 3, 7), "b")]
    whole = merged(examples_of(turns[1], example(range(12), (2, 3, 7, 11), "c"), turns[0]))
    (only,) = whole
    assert only.where == "c" and only.tokens.tolist() == list(range(12))
    assert only.target.tolist() == [0, 0, 3, 3, 0, 0, 0, 2, 0, 0, 0, 1]
    assert (len(whole), whole.count, whole.merged, whole.merged_inputs) == (1, 3, 2, 3 + 7)
    assert whole.lengths.tolist() == [12] and whole.target_counts.tolist() == [9]
    assert whole.format == "chat" and whole.loss_on == "assistant"


def test_an_example_that_others_only_resemble_stays_as_it_is():
    examples = examples_of(example((1, 2, 3), (2,)), example((1, 2, 4, 5), (3,)))
    assert merged(examples) is examples


def test_equal_examples_are_in_chains_of_their_own():
    """Of three equal greetings two begin a chat each, and a chat that is there twice stays twice."""
    hello = example((1, 2), (1,))
    chats = [example((1, 2, 3, 4), (3,)), example((1, 2, 5, 6), (3,))]
    whole = merged(examples_of(hello, chats[0], hello, chats[1], hello))
    assert sorted(e.target.sum() for e in whole) == [1, 2, 2] and whole.merged == 2
    twice = examples_of(chats[0], chats[0])
    assert merged(twice) is twice


@pytest.mark.parametrize("seed", range(3))
def test_targets_are_those_of_the_examples_apart(seed):
    examples = random_examples(seed)
    whole = merged(examples)
    assert targets_of(whole) == targets_of(examples)
    assert 0 < whole.merged == len(examples) - len(whole) and whole.targets == examples.targets
    assert whole.lengths.tolist() == [len(e.tokens) for e in whole]
    assert whole.target_counts.tolist() == [e.target.sum() for e in whole]
    apart = int((examples.lengths - 1).sum())
    assert whole.merged_inputs == apart - int((whole.lengths - 1).sum())


def test_a_batch_has_a_target_once_for_each_example():
    """Six targets of two inputs need more room than a batch of one row has inputs."""
    items = [example((1, 2, 3)[:length], range(1, length)) for length in (2, 3)]
    long = example((1, 2, 3, 4), (1, 2, 3))
    whole = merged(examples_of(*items, long))
    collate = TokenCollate(1, 7)
    batch = collate(whole, [0])
    owned = batch.inputs["owners"] >= 0
    assert batch.inputs["positions"][owned].tolist() == [0, 0, 0, 1, 1, 2]
    assert batch.inputs["targets"][owned].tolist() == [2, 2, 2, 3, 3, 4]
    assert batch.targets == batch.denominator == 6
    assert collate.shape(whole, np.array([0])) == batch.inputs["tokens"].shape[1:] + (len(owned),)


def test_a_compiled_shape_holds_every_batch_of_merged_examples():
    items = [example(range(length), range(1, length)) for length in range(2, 30)]
    other = example(range(100, 140), (39,))
    whole = merged(examples_of(*items, other, other, other))
    shapes = few_shapes(whole, Sampler(whole.lengths, 2, 64))
    assert max(slots for _, slots in shapes) >= whole.target_counts.max() + 1
