"""8-bit codes on the dynamic map."""

import numpy as np
import pytest

from mlx_packs.ops.blockwise import BLOCK_SIZE, decode, dynamic_map, encode
from mlx_packs.runtime import mx


@pytest.mark.parametrize("signed", [True, False])
def test_dynamic_map_is_sorted_and_has_its_decades(signed):
    table = np.array(dynamic_map(signed))
    assert table.size == 256 and (np.diff(table) > 0).all() and table[-1] == 1 and 0 in table
    positive = table[(table > 0) & (table < 1)]
    counts = [((positive > 10.0 ** (e - 1)) & (positive < 10.0**e)).sum() for e in range(-6, 1)]
    assert counts == [2 ** (i + (not signed)) for i in range(7)]
    assert (table.min() < 0) == signed


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("shape", [(300,), (7, 33), (2, 256), (1,), (0,)])
def test_decode_restores_encoded_values_within_precision(shape, signed):
    values = mx.random.normal(shape)
    values = values if signed else values.square()
    codes, scales = encode(values, signed)
    assert codes.dtype == mx.uint8 and codes.shape == (values.size,)
    assert scales.shape == (-(-values.size // BLOCK_SIZE),)
    result = decode(codes, scales, shape, signed)
    assert result.shape == values.shape
    if values.size:
        assert (mx.abs(result - values).max() / mx.abs(values).max()).item() < 0.04


def test_zeros_stay_zeros():
    codes, scales = encode(mx.zeros((600,)))
    assert not decode(codes, scales, (600,)).any().item() and not scales.any().item()
