"""exp, SwiGLU and GELU against MLX's own, values and gradients."""

import math
from functools import partial

import mlx.nn as nn
import numpy as np
import pytest

from mlx_packs.cpu.exponential import exp, exp2
from mlx_packs.cpu.profile import CPU
from mlx_packs.ops.profile import GPU
from mlx_packs.runtime import mx
from tests.helpers.comparison import all_close
from tests.helpers.memory import peak_bytes


@pytest.mark.parametrize(
    ("function", "exact", "lowest", "highest"), [(exp, np.exp, -44, 88), (exp2, np.exp2, -64, 127)]
)
def test_exponentials_are_within_4e_7_of_float64(function, exact, lowest, highest):
    x = np.concatenate([np.linspace(lowest, highest, 100_001), np.linspace(-1, 1, 10_001)])
    x = np.concatenate([x, [0.0, -0.0, 1e-30, -1e-30]]).astype(np.float32)
    expected = exact(x.astype(np.float64))
    assert np.abs(np.array(function(mx.array(x))) / expected - 1).max() < 4e-7


def test_exponentials_are_finite_and_positive_beyond_their_range():
    values = np.array(exp(mx.array([-1e30, -100.0, 89.0, 1e30])))
    assert np.isfinite(values).all() and (values[:2] < 1e-19).all() and (values[2:] > 1e38).all()
    below = np.array(exp2(mx.array([-64.4, -1e30, -float("inf")])))
    assert (below == 2.0**-64).all()


def test_what_is_masked_has_normal_products_with_small_gradients():
    """An Intel processor is several times slower with subnormal numbers."""
    masked = mx.array([-200.0, -1e30, -float("inf")])
    for values in (exp(masked), exp2(masked)):
        assert (values * 1e-18 >= mx.finfo(mx.float32).smallest_normal).all().item()


@pytest.mark.parametrize("rows", [1, 1023])
def test_swiglu_by_rows_is_swiglu_of_each_row(rows):
    """1023 rows of 1024 are three pieces and a part of one."""
    gate, up, cotangent = (mx.random.normal((rows, 1024)) for _ in range(3))
    result = mx.vjp(CPU.swiglu, [gate, up], [cotangent])
    expected = mx.vjp(lambda g, u: nn.silu(g) * u, [gate, up], [cotangent])
    assert all_close(result[0] + result[1], expected[0] + expected[1], rtol=1e-5, atol=1e-5)


def test_swiglu_and_its_gradients_need_little_memory(nothing_ahead):
    """Three results, and pieces of 1 MB; computed at once they were 15 arrays of this size."""
    gate, up, cotangent = (mx.random.normal((2048, 1024)) for _ in range(3))
    compute = partial(mx.vjp, CPU.swiglu, [gate, up], [cotangent])
    assert peak_bytes(compute, gate, up, cotangent) < 6 * gate.nbytes


@pytest.mark.parametrize("device", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_swiglu_and_its_gradients_are_those_of_silu_times_up(dtype, device):
    gate, up = (mx.random.normal((7, 33)).astype(dtype) * 4 for _ in range(2))

    def both(f):
        return mx.value_and_grad(lambda g, u: (f(g, u) * up).sum(), argnums=(0, 1))(gate, up)

    (value, grads), (expected, wanted) = both(device.swiglu), both(lambda g, u: nn.silu(g) * u)
    tolerance = 1e-5 if dtype == mx.float32 else 0
    assert abs(value.item() / expected.item() - 1) <= tolerance
    for gradient, reference in zip(grads, wanted, strict=True):
        assert gradient.dtype == dtype
        rounding = 8 * mx.finfo(dtype).eps  # of each operation of the reference
        assert mx.allclose(gradient, reference, rtol=rounding, atol=rounding).item()


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_swiglu_gradients_in_half_precision_are_rounded_once(dtype):
    arrays = [(mx.random.normal((64, 33)) * 2).astype(dtype) for _ in range(3)]
    *primals, cotangent = arrays
    _, gradients = mx.vjp(CPU.swiglu, primals, [cotangent])
    *exact, truth = [a.astype(mx.float32) for a in arrays]
    _, expected = mx.vjp(lambda g, u: nn.silu(g) * u, exact, [truth])
    for gradient, reference in zip(gradients, expected, strict=True):
        error = mx.abs(gradient.astype(mx.float32) - reference)
        assert (error <= 2 * mx.finfo(dtype).eps * mx.abs(reference) + 1e-6).all().item()


def test_gelu_and_its_gradient_are_within_1e_6_of_float64():
    x = np.concatenate([np.linspace(-12, 12, 20_001), [0.0, 1e-30, -60.0, 60.0]])
    x = x.astype(np.float32)
    below = np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in x.astype(np.float64)])
    density = np.exp(-(x.astype(np.float64) ** 2) / 2) / math.sqrt(2 * math.pi)
    value = CPU.gelu(mx.array(x))
    gradient = mx.grad(lambda v: CPU.gelu(v).sum())(mx.array(x))
    scale = np.maximum(np.abs(x), 1)
    assert (np.abs(np.array(value) - x * below) / scale).max() < 1e-6
    assert np.abs(np.array(gradient) - (below + x * density)).max() < 2e-6


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_gelu_of_other_dtypes_is_mlxs_own(dtype):
    x = mx.random.normal((7, 33)).astype(dtype)
    assert mx.array_equal(CPU.gelu(x), nn.gelu(x)).item() and CPU.gelu(x).dtype == dtype
