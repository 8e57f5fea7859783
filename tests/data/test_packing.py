"""Packed sequences: which examples share one, and batches that share the places of theirs."""

from itertools import islice

import numpy as np
import pytest

from mlx_packs import runtime
from mlx_packs.data.batches import most_targets, token_collate
from mlx_packs.data.dataset import Dataset
from mlx_packs.data.encoding import Example, Examples
from mlx_packs.data.sampler import Draw, Sampler, aligned_batches, packing_fill
from mlx_packs.data.shapes import MOST_SHAPES, sequence_inputs


def lengths_of(count: int, mean: float, limit: int) -> np.ndarray:
    """Lognormal inputs of examples, at most the limit."""
    drawn = np.random.default_rng(0).lognormal(np.log(mean) - 0.25, 0.7, count)
    return drawn.round().astype(int).clip(1, limit)


def batches_of(inputs: np.ndarray, seed: int = 0, batch_size: int = 4, limit: int = 256) -> list:
    return aligned_batches(inputs, batch_size, limit, np.random.default_rng(seed))


@pytest.mark.parametrize("is_aligned", [False, True])
def test_packed_sequences_are_97_percent_full(is_aligned):
    lengths = lengths_of(4000, 200, 2048) + 1
    sampler = Sampler(lengths, 4, 2048, packing=True, aligned=is_aligned)
    count, fill = packing_fill(sampler)
    assert fill >= 0.97 and count * 2048 >= (lengths - 1).sum()
    assert count == sum(len(batch.sequences) for batch in sampler.epoch(0))


def test_aligned_batches_share_spans_that_depend_on_lengths_alone():
    inputs = lengths_of(2000, 40, 256)
    first, second = batches_of(inputs, 0), batches_of(inputs, 1)
    spans = {batch.spans for batch in first}
    assert spans == {batch.spans for batch in second} and len(spans) <= MOST_SHAPES
    assert len(first) > 2 * len(spans)
    assert [b.examples.tolist() for b in first] != [b.examples.tolist() for b in second]


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

    slots, shapes = {}, set()
    for batch in islice(data.batches(), count):
        assert batch.inputs["targets"].size >= batch.targets
        slots.setdefault(batch.layout, set()).add(batch.inputs["targets"].size)
        shapes.add((batch.inputs["tokens"].shape[1], batch.inputs["targets"].size))

    assert all(len(sizes) == 1 for sizes in slots.values())
    assert shapes == data.shapes(count)


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
