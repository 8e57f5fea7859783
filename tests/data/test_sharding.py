"""Slices of batches: those of all ranks are the batch, and nothing twice."""

import itertools

import numpy as np
import pytest

from mlx_packs.data.packing import Packed
from mlx_packs.data.sampler import Draw, Sampler
from mlx_packs.data.sharding import check_ranks, rank_slice
from tests.helpers.errors import raises

LENGTHS = np.random.default_rng(0).integers(4, 60, 83)


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"packing": True},
        {"packing": True, "aligned": True},
        {"draw": Draw(20, None, 0.25)},
    ],
    ids=["examples", "packed", "aligned", "replay"],
)
def test_slices_of_all_ranks_are_every_batch(settings, world):
    sampler = Sampler(LENGTHS, 8, 63, 5, **settings)
    for order in itertools.islice(sampler.batches(), 40):
        slices = [rank_slice(order, rank, world) for rank in range(world)]
        if isinstance(order, Packed):
            for each in slices:
                assert each.spans is None or len(each.spans) == len(each.sequences)
            parts = [list(map(tuple, each.sequences)) for each in slices]
            whole = list(map(tuple, order.sequences))
            spans = [span for each in slices for span in each.spans or ()]
            assert sorted(spans) == sorted(order.spans or ())
        else:
            parts, whole = [each.tolist() for each in slices], order.tolist()
        assert sorted(itertools.chain(*parts)) == sorted(whole)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_too_few_examples_or_too_small_batches_for_the_ranks():
    check_ranks("few.jsonl", 4, 4, 4)
    with raises("data", "data", "few.jsonl: 3 examples are fewer than 4 ranks"):
        check_ranks("few.jsonl", 3, 4, 4)
    with raises("conflict", "batch_size", "2: is less than 4 ranks"):
        check_ranks("few.jsonl", 9, 2, 4)
