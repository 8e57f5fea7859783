"""Batches: every row once an epoch, an order that repeats, shapes that are few."""

import threading
from contextlib import closing
from itertools import islice

import numpy as np
import pytest

from mlx_packs import runtime
from mlx_packs.data.batches import few_shapes, most_targets, token_collate, training_set
from mlx_packs.data.dataset import Batch, Dataset, by_length, first_examples, prefetched
from mlx_packs.data.encoding import Example, Examples
from mlx_packs.data.sampler import Draw, Sampler, aligned_batches, packing_fill
from mlx_packs.data.shapes import MOST_SHAPES, sequence_inputs
from tests.data.test_groups import inputs_of


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


def test_batches_begin_late_without_the_epochs_before(ragged_examples, monkeypatch):
    epochs, epoch = [], Sampler.epoch
    monkeypatch.setattr(
        Sampler, "epoch", lambda self, number: epochs.append(number) or epoch(self, number)
    )
    next(sampler_of(ragged_examples).batches(26 * 1000 + 25))  # 26 batches an epoch
    assert epochs == [1000]


def test_training_batches_differ_by_epoch_and_seed_alone(ragged_examples):
    first, again, second, other = (
        [batch.examples for batch in epoch_of(ragged_examples, epoch, seed)]
        for epoch, seed in ((0, 3), (0, 3), (1, 3), (0, 4))
    )
    assert first == again and first != second and first != other


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
        assert inputs_of(batch) == inputs_of(plain)


@pytest.mark.parametrize("options", [{}, {"packing": True}, {"packing": True, "aligned": True}])
def test_an_epoch_rebuilds_every_example_once(ragged_examples, options):
    sampler = sampler_of(ragged_examples, 4, 400, **options)
    batches = [token_collate(sampler)(ragged_examples, order) for order in sampler.epoch(0)]
    assert sorted(row for batch in batches for row in batch.examples) == list(range(203))
    other = token_collate(sampler)(ragged_examples, sampler.epoch(1)[0])
    assert other.examples != batches[0].examples

    for batch in batches:
        owners, segments = batch.inputs["owners"], batch.inputs.get("segments")
        flat = batch.inputs["tokens"].ravel()
        left = np.ones(flat.size, bool)
        assert batch.targets == batch.denominator == (owners >= 0).sum()

        for owner, (row, start) in enumerate(zip(batch.examples, batch.starts, strict=True)):
            example, at = ragged_examples.items[row], owners == owner
            stop = start + len(example.tokens) - 1
            assert flat[start:stop].tolist() == example.tokens[:-1].tolist()
            predicted = batch.inputs["positions"][at] - start + 1
            assert predicted.tolist() == np.flatnonzero(example.target).tolist()
            assert batch.inputs["targets"][at].tolist() == example.tokens[predicted].tolist()

            if segments is not None:
                line, first = divmod(start, 400)
                same = np.flatnonzero(segments[line] == segments[line][first])
                assert same.tolist() == list(range(first, first + stop - start))
            left[start:stop] = False
        assert not flat[left].any()
        assert segments is None or set(np.diff(segments).ravel()) <= {0, 1}


def test_row_of_the_maximal_length_fills_a_packed_row():
    items = [Example(np.arange(n, dtype=np.int32), np.arange(n) > 0, "x") for n in (9, 9, 2)]
    examples = Examples(items, "text", "all")
    first, second = islice(
        training_set(examples, sampler_of(examples, 2, 8, packing=True)).batches(), 2
    )
    assert sorted(first.examples + second.examples) == [0, 1, 2]


def test_compiled_packed_batches_have_one_width_and_few_sizes_of_targets(ragged_examples, compiled):
    data = training_set(ragged_examples, sampler_of(ragged_examples, 4, 400, packing=True))
    batches = list(islice(data.batches(), 40))
    shapes = {(b.inputs["tokens"].shape[1], b.inputs["targets"].size) for b in batches}
    assert {b.inputs["tokens"].shape for b in batches} == {(4, 400)} and len(shapes) <= 12
    assert shapes == data.shapes(40)


def batch_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("ahead")]


def test_prefetched_batches_are_the_same_in_order(ragged_examples):
    data = training_set(ragged_examples, sampler_of(ragged_examples))
    plain, same = data.batches(20), data.batches(20)
    with closing(prefetched(same)) as ahead:
        for _ in range(30):
            assert next(ahead).examples == next(plain).examples
        assert len(batch_threads()) == 1
    assert not batch_threads()


def test_next_batch_is_made_ahead_and_an_error_raised_where_it_was_due():
    is_ahead = threading.Event()

    def batches():
        yield "first"
        is_ahead.set()
        yield "second"
        raise OSError("the disk is gone")

    ahead = prefetched(batches())
    assert next(ahead) == "first"
    assert is_ahead.wait(10)  # nobody has asked for the second
    assert next(ahead) == "second"
    with pytest.raises(OSError, match="the disk is gone"):
        next(ahead)
    assert not batch_threads()


def test_chosen_examples_come_by_length():
    order = by_length(np.array([5, 1, 3, 2]), 2, np.array([3, 0, 2]))
    assert [own.tolist() for own in order.epoch(0)] == [[3, 2], [0]]
    assert [len(first_examples(5, 2, batches)) for batches in (-1, 1, 9)] == [5, 2, 5]


def lengths_of(count: int, mean: float, limit: int) -> np.ndarray:
    """Lognormal inputs of examples, at most the limit."""
    drawn = np.random.default_rng(0).lognormal(np.log(mean) - 0.25, 0.7, count)
    return drawn.round().astype(int).clip(1, limit)


@pytest.mark.parametrize("is_aligned", [False, True])
def test_packed_sequences_are_97_percent_full(is_aligned):
    lengths = lengths_of(4000, 200, 2048) + 1
    sampler = Sampler(lengths, 4, 2048, packing=True, aligned=is_aligned)
    count, fill = packing_fill(sampler)
    assert fill >= 0.97 and count * 2048 >= (lengths - 1).sum()
    assert count == sum(len(batch.sequences) for batch in sampler.epoch(0))


def test_aligned_batches_share_spans_that_depend_on_lengths_alone():
    inputs = lengths_of(2000, 40, 256)
    randoms = (np.random.default_rng(seed) for seed in (0, 1))
    first, second = (aligned_batches(inputs, 4, 256, random) for random in randoms)
    spans = {batch.spans for batch in first}
    assert spans == {batch.spans for batch in second} and len(spans) <= MOST_SHAPES
    assert len(first) > 2 * len(spans)
    assert [b.examples.tolist() for b in first] != [b.examples.tolist() for b in second]


def test_aligned_batches_of_equal_spans_have_one_shape(ragged_examples):
    sampler = sampler_of(ragged_examples, 4, 256, packing=True, aligned=True)
    count = len(sampler.epoch(0))
    allowed = most_targets(ragged_examples, sampler)
    data = Dataset(ragged_examples, token_collate(sampler, allowed), sampler)

    slots, shapes = {}, set()
    for batch in islice(data.batches(), count):
        assert batch.inputs["targets"].size >= batch.targets
        slots.setdefault(batch.layout, set()).add(batch.inputs["targets"].size)
        shapes.add((batch.inputs["tokens"].shape[1], batch.inputs["targets"].size))

    assert all(len(sizes) == 1 for sizes in slots.values())
    assert shapes == data.shapes(count)


def test_replayed_sequences_are_not_aligned(ragged_examples):
    draw = Draw(100, None, 0.5)
    sampler = sampler_of(ragged_examples, 4, 256, packing=True, draw=draw, aligned=True)
    assert next(iter(sampler.batches())).spans is None


@pytest.mark.parametrize(("tokens", "inputs"), [(2048, 2048), (96, 96), (1001, 1000), (100, 99)])
def test_sequences_on_a_gpu_have_whole_tiles(monkeypatch, tokens, inputs):
    assert sequence_inputs(tokens) == tokens - 1
    monkeypatch.setattr(runtime, "COMPILES", True)
    assert sequence_inputs(tokens) == inputs
