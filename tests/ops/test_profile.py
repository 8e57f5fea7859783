"""Which profile computes, and that a GPU's is plain MLX in one stream."""

import mlx.nn as nn
import pytest

from mlx_packs import runtime
from mlx_packs.cpu.profile import CPU
from mlx_packs.ops.profile import GPU, forced_profile, profile
from mlx_packs.runtime import mx


@pytest.mark.parametrize(("device", "expected"), [("cpu", CPU), ("gpu", GPU)])
def test_the_profile_is_that_of_the_device(device, expected):
    with runtime.assumed_device(device):
        assert profile() is expected


def test_a_forced_profile_counts_until_its_block_ends():
    before = profile()
    with forced_profile(GPU), runtime.assumed_device("cpu"):
        assert profile() is GPU
    assert profile() is before


def test_a_gpu_computes_one_piece_after_the_other():
    stream = mx.default_stream(mx.default_device())
    for (piece,), number in zip(GPU.rounds(range(3)), range(3), strict=True):
        with piece[0]:
            assert piece[1] == number
            assert mx.default_stream(mx.default_device()) == stream


def test_a_gpu_computes_by_plain_mlx():
    x, w = mx.random.normal((5, 64)), mx.random.normal((7, 64))
    weight, scales, biases = mx.quantize(w, 32, 4)
    expected = mx.dequantize(weight, scales, biases, 32, 4)
    assert mx.array_equal(GPU.dequantize(weight, scales, biases, 32, 4, "affine"), expected)
    assert mx.array_equal(GPU.matmul(x, w), x @ w.T)
    assert mx.array_equal(GPU.exp(x), mx.exp(x))
    assert mx.array_equal(GPU.gelu(x), nn.gelu(x))
    assert mx.array_equal(GPU.swiglu(x, x), nn.silu(x) * x)
