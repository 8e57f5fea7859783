"""Batches: every row once an epoch, an order that repeats, shapes that are few."""

import threading
from contextlib import closing
from itertools import islice

import numpy as np
import pytest

from mlx_packs import runtime
from mlx_packs.data.batches import evaluation_set, few_shapes, token_collate, training_set
from mlx_packs.data.dataset import Batch, Dataset, prefetched
from mlx_packs.data.encoding import Example, Examples
from mlx_packs.data.sampler import Sampler, packing_fill
from mlx_packs.data.shapes import MOST_SHAPES, TILE, padded_length, padded_suffix


@pytest.fixture(scope="module")
def ragged_examples() -> Examples:
    """Rows of 8 to 150 random tokens, of which the later part is learned."""
    random = np.random.default_rng(0)
    items = []
    for length in random.integers(8, 150, 203):
        tokens = random.integers(1, 4000, length).astype(np.int32)
        items.append(Example(tokens, np.arange(length) > random.integers(1, length - 1), "x"))
    return Examples(items, "chat", "assistant")


@pytest.fixture
def compiled(monkeypatch):
    monkeypatch.setattr(runtime, "COMPILES", True)


def sampler_of(examples, batch_size: int = 8, inputs: int = 149, seed: int = 3, **options):
    return Sampler(examples.lengths, batch_size, inputs, seed, **options)


def epoch_of(examples, epoch: int, seed: int = 3) -> list[Batch]:
    count, sampler = -(-len(examples) // 8), sampler_of(examples, seed=seed)
    stream = Dataset(examples, token_collate(sampler), sampler).batches(epoch * count)
    return [next(stream) for _ in range(count)]


def test_training_batches_take_every_example_once_an_epoch(ragged_examples):
    rows = [r for batch in epoch_of(ragged_examples, 4) for r in batch.examples]
    assert sorted(rows) == list(range(203))


def test_batches_begin_late_without_the_epochs_before(ragged_examples, monkeypatch):
    epochs, epoch = [], Sampler.epoch
    monkeypatch.setattr(
        Sampler, "epoch", lambda self, number: epochs.append(number) or epoch(self, number)
    )
    next(sampler_of(ragged_examples).batches(26 * 1000 + 25))  # 26 batches an epoch
    assert epochs == [1000]


def test_training_batches_differ_by_epoch_and_seed_alone(ragged_examples):
    first, again = epoch_of(ragged_examples, 0), epoch_of(ragged_examples, 0)
    assert [b.examples for b in first] == [b.examples for b in again]
    assert [b.examples for b in first] != [b.examples for b in epoch_of(ragged_examples, 1)]
    assert [b.examples for b in first] != [b.examples for b in epoch_of(ragged_examples, 0, seed=4)]


@pytest.mark.parametrize("start", [25, 60])
def test_training_batches_resume_from_any_batch(ragged_examples, start):
    data = training_set(ragged_examples, sampler_of(ragged_examples))
    whole = islice(data.batches(), start, None)
    for a, b in islice(zip(whole, data.batches(start), strict=True), 30):
        assert a.examples == b.examples and np.array_equal(a.inputs["tokens"], b.inputs["tokens"])


@pytest.mark.parametrize(("compiles", "padding"), [(True, 16), (False, 4)])
def test_batches_have_little_padding(ragged_examples, monkeypatch, compiles, padding):
    """On average a batch is padded by half of the multiple that its length is rounded to."""
    monkeypatch.setattr(runtime, "COMPILES", compiles)
    batches = list(epoch_of(ragged_examples, 0))
    added = [
        b.inputs["tokens"].shape[1] - max(ragged_examples.lengths[[*b.examples]] - 1)
        for b in batches
    ]
    assert max(added) < 2 * padding and np.mean(added) < 1.5 * padding
    assert sum(b.inputs["targets"].size for b in batches) <= 1.1 * sum(b.targets for b in batches)


@pytest.mark.parametrize("rows", [1, 3, 4, 6, 12])
def test_suffixes_that_are_compiled_are_whole_tiles_together(compiled, rows):
    widths = [padded_suffix(longest, 1000, rows) for longest in range(1, 200)]
    assert all(width % 8 == 0 and rows * width % TILE == 0 for width in widths)
    assert all(0 <= width - longest < TILE for longest, width in enumerate(widths, 1))
    if rows % 4 == 0:
        assert set(widths) == set(range(8, 201, 8))


def test_compiled_run_has_few_shapes_and_the_same_examples(ragged_examples, compiled):
    pairs = sampler_of(ragged_examples, 2)
    free = Dataset(ragged_examples, token_collate(pairs), pairs)
    few = few_shapes(ragged_examples, pairs)
    assert len(free.shapes(1000)) > MOST_SHAPES >= len(few)

    joined = training_set(ragged_examples, pairs)
    stream = joined.batches()
    batches = [next(stream) for _ in range(1000)]
    assert {(b.inputs["tokens"].shape[1], b.inputs["targets"].size) for b in batches} <= few
    assert joined.shapes(1000) <= few

    for batch, plain in zip(batches[:100], free.batches(), strict=False):
        assert batch.examples == plain.examples and batch.targets == plain.targets
        own = batch.inputs
        theirs = plain.inputs
        count = batch.targets
        width = own["tokens"].shape[1]
        least = theirs["tokens"].shape[1]
        assert width >= least and np.array_equal(own["tokens"][:, :least], theirs["tokens"])
        assert np.array_equal(
            own["tokens"].reshape(-1)[own["positions"][:count]],
            theirs["tokens"].reshape(-1)[theirs["positions"][:count]],
        )
        assert np.array_equal(own["targets"][:count], theirs["targets"][:count])


def test_evaluation_batches_come_in_few_shapes_where_each_is_compiled(ragged_examples, compiled):
    chosen = np.arange(len(ragged_examples))
    many, few = (
        evaluation_set(ragged_examples, 2, 150, chosen, few).once() for few in (False, True)
    )
    assert [batch.examples for batch in many] == [batch.examples for batch in few]
    assert [batch.targets for batch in many] == [batch.targets for batch in few]
    shapes = [
        {(*b.inputs["tokens"].shape, len(b.inputs["targets"])) for b in batches}
        for batches in (many, few)
    ]
    assert len(shapes[0]) > MOST_SHAPES >= len(shapes[1])


def test_positions_and_targets_rebuild_the_examples(ragged_examples):
    batch = epoch_of(ragged_examples, 0)[3]
    width = batch.inputs["tokens"].shape[1]
    for b, row in enumerate(batch.examples):
        example = ragged_examples.items[row]
        at = batch.inputs["owners"] == b
        inputs = batch.inputs["tokens"][b, : len(example.tokens) - 1]
        assert inputs.tolist() == example.tokens[:-1].tolist()
        assert not batch.inputs["tokens"][b, len(example.tokens) - 1 :].any()
        columns = batch.inputs["positions"][at] - b * width
        assert (columns + 1).tolist() == np.flatnonzero(example.target).tolist()
        assert batch.inputs["targets"][at].tolist() == example.tokens[example.target].tolist()


@pytest.mark.parametrize("longest", [1, 32, 33, 5000])
def test_padded_length_is_enough_and_at_most_the_limit(longest):
    assert longest <= padded_length(longest, 10**6) <= longest * 1.5 + 32
    assert padded_length(longest, longest) == longest


def packed_epochs(examples, count: int, start: int = 0, seed: int = 3) -> list[Batch]:
    sampler = sampler_of(examples, 4, 400, seed, packing=True)
    stream = training_set(examples, sampler).batches(start)
    return [next(stream) for _ in range(count)]


def test_packed_batches_take_every_example_once_an_epoch(ragged_examples):
    sampler = sampler_of(ragged_examples, 4, 400, packing=True)
    sizes = [len(sampler.epoch(number)) for number in range(3)]
    batches = packed_epochs(ragged_examples, sum(sizes))
    for epoch, size in enumerate(sizes):
        own = batches[sum(sizes[:epoch]) :][:size]
        assert sorted(r for b in own for r in b.examples) == list(range(203))
    first, second = batches[0].examples, batches[sizes[0]].examples
    assert first != second and first != packed_epochs(ragged_examples, 1, seed=4)[0].examples


def test_compiled_packed_batches_have_one_width_and_few_sizes_of_targets(ragged_examples, compiled):
    batches = packed_epochs(ragged_examples, 40)
    shapes = {(b.inputs["tokens"].shape[1], b.inputs["targets"].size) for b in batches}
    assert {b.inputs["tokens"].shape for b in batches} == {(4, 400)} and len(shapes) <= 12
    sampler = sampler_of(ragged_examples, 4, 400, packing=True)
    assert shapes == training_set(ragged_examples, sampler).shapes(40)


def test_packed_batch_rebuilds_the_examples(ragged_examples):
    for batch in packed_epochs(ragged_examples, 11):
        flat, segments = batch.inputs["tokens"].ravel(), batch.inputs["segments"].ravel()
        left = np.ones(flat.size, bool)
        assert batch.targets == batch.denominator == (batch.inputs["owners"] >= 0).sum()

        for owner, row in enumerate(batch.examples):
            example = ragged_examples.items[row]
            at = batch.inputs["owners"] == owner
            begin = batch.inputs["positions"][at][0] + 1 - np.flatnonzero(example.target)[0]
            inputs = slice(begin, begin + len(example.tokens) - 1)
            assert flat[inputs].tolist() == example.tokens[:-1].tolist()

            places = batch.inputs["positions"][at] - begin + 1
            assert places.tolist() == np.flatnonzero(example.target).tolist()
            assert batch.inputs["targets"][at].tolist() == example.tokens[example.target].tolist()

            mine = begin // 400, segments[begin]
            same = (np.arange(flat.size) // 400 == mine[0]) & (segments == mine[1])
            assert np.flatnonzero(same).tolist() == list(range(inputs.start, inputs.stop))
            left[inputs] = False

        assert not flat[left].any()
        for b, row in enumerate(batch.inputs["segments"]):
            assert set(np.diff(row)) <= {0, 1}
            assert len(set(row[left.reshape(4, 400)[b]])) <= 1


def test_packed_rows_are_97_percent_full_on_lognormal_lengths():
    random = np.random.default_rng(0)
    lengths = random.lognormal(np.log(200), 0.8, 2000).astype(int).clip(2, 2048)
    sampler = Sampler(lengths, 4, 2047, seed=0, packing=True)
    count, fill = packing_fill(sampler)
    assert fill >= 0.97
    assert count == sum(len(batch.sequences) for batch in sampler.epoch(0))


def test_row_of_the_maximal_length_fills_a_packed_row():
    items = [Example(np.arange(n, dtype=np.int32), np.arange(n) > 0, "x") for n in (9, 9, 2)]
    examples = Examples(items, "text", "all")
    stream = training_set(examples, sampler_of(examples, 2, 8, 0, packing=True)).batches()
    assert sorted(r for _ in range(2) for r in next(stream).examples) == [0, 1, 2]


def batch_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("batches")]


def test_prefetched_batches_are_the_same_in_order(ragged_examples):
    data = training_set(ragged_examples, sampler_of(ragged_examples))
    plain, same = data.batches(20), data.batches(20)
    with closing(prefetched(same)) as ahead:
        for _ in range(30):
            assert next(ahead).examples == next(plain).examples
        assert len(batch_threads()) == 1
    assert not batch_threads()


def test_next_batch_is_made_while_this_one_is_worked_on():
    is_ahead = threading.Event()

    def batches():
        yield "first"
        is_ahead.set()
        yield "second"

    with closing(prefetched(batches())) as ahead:
        assert next(ahead) == "first"
        assert is_ahead.wait(10)  # nobody has asked for the second
        assert list(ahead) == ["second"]
    assert not batch_threads()


def test_error_of_a_batch_is_raised_where_it_was_due():
    def batches():
        yield "first"
        raise OSError("the disk is gone")

    ahead = prefetched(batches())
    assert next(ahead) == "first"
    with pytest.raises(OSError, match="the disk is gone"):
        next(ahead)
    assert not batch_threads()


def test_shapes_that_spare_less_than_a_compilation_are_joined(compiled):
    """Examples of 33 and 34 tokens alone need two lengths; of few, one is cheaper."""

    def shapes_of(count: int) -> set[int]:
        tokens = [np.ones(n, np.int32) for n in [33] * count + [34] * count]
        items = [Example(t, np.arange(len(t)) > 0, "x") for t in tokens]
        examples = Examples(items, "text", "all tokens")
        return {length for length, _ in few_shapes(examples, sampler_of(examples, 4, 64))}

    assert shapes_of(4) == {64} and shapes_of(400) == {32, 64}
