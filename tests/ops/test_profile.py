"""Which profile computes."""

import mlx.nn as nn
import pytest

from mlx_packs import runtime
from mlx_packs.cpu.profile import CPU
from mlx_packs.ops.profile import GPU, profile
from mlx_packs.runtime import mx


@pytest.mark.parametrize(("device", "expected"), [("cpu", CPU), ("gpu", GPU)])
def test_the_profile_is_that_of_the_device(device, expected):
    with runtime.assumed_device(device):
        assert profile() is expected


def test_a_gpu_computes_by_plain_mlx():
    x, w = mx.random.normal((5, 64)), mx.random.normal((7, 64))
    weight, scales, biases = mx.quantize(w, 32, 4)
    expected = mx.dequantize(weight, scales, biases, 32, 4)
    assert mx.array_equal(GPU.dequantize(weight, scales, biases, 32, 4, "affine"), expected)
    assert mx.array_equal(GPU.matmul(x, w), x @ w.T)
    assert mx.array_equal(GPU.exp(x), mx.exp(x))
    assert mx.array_equal(GPU.gelu(x), nn.gelu(x))
    assert mx.array_equal(GPU.swiglu(x, x), nn.silu(x) * x)
