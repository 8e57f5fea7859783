"""Packed sequences: which examples share one, and batches that share the places of theirs."""

import numpy as np
import pytest

from mlx_packs import runtime
from mlx_packs.data.batches import most_targets, token_collate
from mlx_packs.data.dataset import Dataset
from mlx_packs.data.encoding import Example, Examples
from mlx_packs.data.sampler import Draw, Sampler, aligned_batches, first_fit, packing_fill
from mlx_packs.data.shapes import MOST_SHAPES, sequence_inputs


def lengths_of(count: int, mean: float, limit: int) -> np.ndarray:
    """Lognormal inputs of examples, at most the limit."""
    drawn = np.random.default_rng(0).lognormal(np.log(mean) - 0.25, 0.7, count)
    return drawn.round().astype(int).clip(1, limit)


def batches_of(inputs: np.ndarray, seed: int = 0, batch_size: int = 4, limit: int = 256) -> list:
    return aligned_batches(inputs, batch_size, limit, np.random.default_rng(seed))


def test_first_fit_puts_the_longest_first_where_it_first_fits():
    inputs = np.array([3, 7, 2, 5, 4, 1])
    assert [r.tolist() for r in first_fit(inputs, np.arange(6), 8)] == [[1, 5], [3, 0], [4, 2]]


@pytest.mark.parametrize("count", [1, 29, 300])
def test_aligned_batches_have_every_example_once_in_its_place(count):
    inputs = lengths_of(count, 40, 256)
    batches = batches_of(inputs)
    indices = np.concatenate([batch.examples for batch in batches])
    assert sorted(indices.tolist()) == list(range(count))
    for batch in batches:
        assert 1 <= len(batch.sequences) == len(batch.spans) <= 4
        for sequence, spans in zip(batch.sequences, batch.spans, strict=True):
            assert sum(spans) == 256 and len(sequence) <= len(spans)
            assert (inputs[sequence] <= spans[: len(sequence)]).all()


def test_aligned_batches_share_spans_that_depend_on_lengths_alone():
    inputs = lengths_of(2000, 40, 256)
    first, second = batches_of(inputs, 0), batches_of(inputs, 1)
    spans = {batch.spans for batch in first}
    assert spans == {batch.spans for batch in second} and len(spans) <= MOST_SHAPES
    assert len(first) > 2 * len(spans)
    assert [b.examples.tolist() for b in first] != [b.examples.tolist() for b in second]


def test_aligned_sequences_are_97_percent_full():
    lengths = lengths_of(4000, 200, 2048) + 1
    count, fill = packing_fill(Sampler(lengths, 4, 2048, packing=True, aligned=True))
    assert fill >= 0.97 and count * 2048 >= (lengths - 1).sum()


def ragged_examples(supervised: float) -> Examples:
    """Chats of 2 to 256 tokens of which a share is supervised."""
    items = []
    for inputs in lengths_of(400, 40, 255):
        target = np.arange(inputs + 1) > inputs - max(1, round(inputs * supervised))
        tokens = np.random.default_rng(inputs).integers(1, 99, inputs + 1).astype(np.int32)
        items.append(Example(tokens, target, "x"))
    return Examples(items, "chat", "assistant")


@pytest.mark.parametrize("supervised", [1.0, 0.3])
def test_aligned_batches_of_equal_spans_have_one_shape(supervised):
    examples = ragged_examples(supervised)
    sampler = Sampler(examples.lengths, 4, 256, packing=True, aligned=True)
    allowed = most_targets(examples, sampler)
    count = len(sampler.epoch(0))
    data = Dataset(examples, token_collate(sampler, allowed), sampler)

    stream = data.batches()
    slots: dict = {}
    shapes = set()
    for _ in range(count):
        batch = next(stream)
        assert batch.inputs["targets"].size >= batch.targets
        slots.setdefault(batch.layout, set()).add(batch.inputs["targets"].size)
        shapes.add((batch.inputs["tokens"].shape[1], batch.inputs["targets"].size))

    assert all(len(sizes) == 1 for sizes in slots.values())
    assert shapes == data.shapes(count)


def test_aligned_batch_rebuilds_the_examples():
    examples = ragged_examples(0.5)
    sampler = Sampler(examples.lengths, 4, 256, packing=True, aligned=True)
    for order in sampler.epoch(3):
        batch = token_collate(sampler)(examples, order)
        flat = batch.inputs["tokens"].ravel()
        for owner, (row, start) in enumerate(zip(batch.examples, batch.starts, strict=True)):
            tokens, at = examples.items[row].tokens, batch.inputs["owners"] == owner
            assert flat[start : start + len(tokens) - 1].tolist() == tokens[:-1].tolist()
            predicted = batch.inputs["positions"][at] - start + 1
            assert predicted.tolist() == np.flatnonzero(examples.items[row].target).tolist()
            assert batch.inputs["targets"][at].tolist() == tokens[predicted].tolist()


def test_replayed_sequences_are_not_aligned():
    lengths = lengths_of(200, 40, 256) + 1
    draw = Draw(100, None, 0.5)
    sampler = Sampler(lengths, 4, 256, packing=True, draw=draw, aligned=True)
    assert next(iter(sampler.batches())).spans is None


@pytest.mark.parametrize(("tokens", "inputs"), [(2048, 2048), (96, 96), (1001, 1000), (100, 99)])
def test_sequences_on_a_gpu_have_whole_tiles(monkeypatch, tokens, inputs):
    assert sequence_inputs(tokens) == tokens - 1
    monkeypatch.setattr(runtime, "COMPILES", True)
    assert sequence_inputs(tokens) == inputs
