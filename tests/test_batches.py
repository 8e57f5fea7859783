"""Batches: every row once an epoch, an order that repeats, shapes that are few."""

import numpy as np
import pytest

from mlx_packs.batches import (
    Batch,
    evaluation_batches,
    make_batch,
    padded_length,
    training_batches,
)
from mlx_packs.encoding import Example, Examples


@pytest.fixture(scope="module")
def examples() -> Examples:
    """Rows of 8 to 150 random tokens, of which the later part is learned."""
    random = np.random.default_rng(0)
    items = []
    for length in random.integers(8, 150, 203):
        tokens = random.integers(1, 4000, length).astype(np.int32)
        items.append(Example(tokens, np.arange(length) > random.integers(1, length - 1), "x"))
    return Examples(items, "chat", "assistant")


def epoch_of(examples, epoch: int, seed: int = 3) -> list[Batch]:
    count = -(-len(examples) // 8)
    stream = training_batches(examples, 8, 150, seed, start=epoch * count)
    return [next(stream) for _ in range(count)]


@pytest.mark.parametrize("epoch", [0, 4])
def test_training_batches_take_every_row_once_an_epoch(examples, epoch):
    rows = [r for batch in epoch_of(examples, epoch) for r in batch.rows]
    assert sorted(rows) == list(range(203))


def test_training_batches_differ_by_epoch_and_seed_alone(examples):
    first, again = epoch_of(examples, 0), epoch_of(examples, 0)
    assert [b.rows for b in first] == [b.rows for b in again]
    assert [b.rows for b in first] != [b.rows for b in epoch_of(examples, 1)]
    assert [b.rows for b in first] != [b.rows for b in epoch_of(examples, 0, seed=4)]


@pytest.mark.parametrize("start", [1, 25, 26, 60])
def test_training_batches_resume_from_any_batch(examples, start):
    whole, resumed = (
        training_batches(examples, 8, 150, 3),
        training_batches(examples, 8, 150, 3, start),
    )
    for _ in range(start):
        next(whole)
    for _ in range(30):
        a, b = next(whole), next(resumed)
        assert a.rows == b.rows and np.array_equal(a.tokens, b.tokens)


def test_training_batches_come_in_few_shapes(examples):
    shapes = {(b.tokens.shape, b.targets.shape) for b in epoch_of(examples, 0)}
    assert len(shapes) <= 12
    assert max(shape[1] for shape, _ in shapes) < 150


def test_make_batch_positions_and_targets_rebuild_the_rows(examples):
    batch = epoch_of(examples, 0)[3]
    width = batch.tokens.shape[1]
    for b, row in enumerate(batch.rows):
        example = examples.items[row]
        at = batch.owners == b
        inputs = batch.tokens[b, : len(example.tokens) - 1]
        assert inputs.tolist() == example.tokens[:-1].tolist()
        assert not batch.tokens[b, len(example.tokens) - 1 :].any()
        columns = batch.positions[at] - b * width
        assert (columns + 1).tolist() == np.flatnonzero(example.target).tolist()
        assert batch.targets[at].tolist() == example.tokens[example.target].tolist()


def test_make_batch_weighs_real_targets_alone(examples):
    batch = make_batch(examples.items, [5, 6], 8, 149)
    assert batch.count == batch.weights.sum() == (batch.owners >= 0).sum()
    assert batch.tokens.shape[0] == 8 and set(batch.owners.tolist()) == {0, 1, -1}


@pytest.mark.parametrize("limit", [-1, 0, 3, 1000])
def test_evaluation_batches_limit_counts_batches(examples, limit):
    taken = evaluation_batches(examples, 8, 150, limit)
    assert len(taken) == (26 if limit < 0 or limit > 26 else limit)
    rows = [r for b in taken for r in b.rows]
    assert len(set(rows)) == len(rows) == min(203, 8 * len(taken))


@pytest.mark.parametrize("longest", [1, 31, 32, 33, 500, 2047, 5000])
def test_padded_length_is_enough_and_at_most_the_limit(longest):
    assert longest <= padded_length(longest, 10**6) <= longest * 1.5 + 32
    assert padded_length(longest, longest) == longest
