"""The emulator itself: what its library computes, how threads are laid out, how it is called."""

import mlx.core as mx
import numpy as np
import pytest

from . import Checks, KernelFault, why_not
from .lint import lint_words
from .samples import run

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_every_16_bit_number_widens_and_rounds_as_mlx_does(dtype):
    bits = mx.arange(65536).astype(mx.uint16)
    body = "uint i = thread_position_in_grid.x; y[i] = float(a[i]);"
    checks = Checks(orders=("forward",))
    wide = run(body, bits.view(dtype), checks=checks)
    expected = bits.view(dtype).astype(mx.float32)
    assert np.array_equal(np.array(wide), np.array(expected), equal_nan=True)

    # Between two neighbours, at the middle, and beyond the largest number.
    values = mx.concatenate([expected * 1.0001, expected * (1 + 2**-9), expected * (1 + 2**-12)])
    body = "uint i = thread_position_in_grid.x; y[i] = T(a[i]);"
    narrow = run(body, values, dtype=dtype, template=[("T", dtype)], checks=checks)
    rounded = values.astype(dtype)
    same = (narrow.view(mx.uint16) == rounded.view(mx.uint16)) | mx.isnan(rounded)
    assert same.all() and (mx.isnan(narrow) == mx.isnan(rounded)).all()


def test_operations_of_a_simdgroup_compute_what_they_say():
    x = mx.random.normal((64,), key=mx.random.key(3))
    groups = np.array(x).reshape(2, 32)
    fours = groups.reshape(2, 8, 4)
    expected = {
        "simd_sum(x)": groups.sum(1, keepdims=True),
        "simd_max(x)": groups.max(1, keepdims=True),
        "simd_prefix_inclusive_sum(x)": groups.cumsum(1),
        "simd_prefix_exclusive_sum(x)": groups.cumsum(1) - groups,
        "simd_broadcast(x, 7)": groups[:, 7:8],
        "simd_shuffle_xor(x, 5)": groups[:, np.arange(32) ^ 5],
        "simd_shuffle_down(x, 3)": groups[:, [*range(3, 32), 29, 30, 31]],
        "simd_shuffle_up(x, 3)": groups[:, [0, 1, 2, *range(29)]],
        "simd_shuffle_rotate_down(x, 3)": np.roll(groups, -3, 1),
        "quad_sum(x)": np.repeat(fours.sum(2), 4, 1),
        "quad_shuffle_xor(x, 1)": fours[:, :, [1, 0, 3, 2]].reshape(2, 32),
    }
    rows = "".join(f"y[{n} * 64 + i] = {text};\n" for n, text in enumerate(expected))
    body = f"uint i = thread_position_in_grid.x; float x = a[i];\n{rows}"
    y = run(body, x, shape=(len(expected), 2, 32), grid=(64, 1, 1), threadgroup=(64, 1, 1))
    for got, (text, wanted) in zip(np.array(y), expected.items(), strict=True):
        np.testing.assert_allclose(got, np.broadcast_to(wanted, (2, 32)), atol=2e-6, err_msg=text)


def test_metal_has_the_threads_of_the_grid_and_smaller_groups_at_its_edge():
    body = """
    uint3 t = thread_position_in_grid, n = threads_per_grid, g = threads_per_threadgroup;
    uint at = ((t.z * n.y + t.y) * n.x + t.x) * 4;
    y[at] = g.x * 100 + g.y * 10 + g.z;
    y[at + 1] = thread_index_in_threadgroup;
    y[at + 2] = simdgroups_per_threadgroup;
    y[at + 3] = threadgroups_per_grid.x * 100 + threadgroup_position_in_grid.x;
    """
    zero = mx.zeros((1,))
    y = run(
        body, zero, shape=(2, 3, 10, 4), dtype=mx.uint32, grid=(10, 3, 2), threadgroup=(8, 2, 4)
    )
    assert y[0, 0, 0].tolist() == [822, 0, 1, 200]
    assert y[1, 2, 9].tolist() == [212, 3, 1, 201]


def test_small_and_0d_inputs_shapes_and_strides_are_as_mlx_generates_them():
    """Under 8 elements means `constant` memory, 0-d a reference: MLX's own text says so."""
    body = """
    uint i = thread_position_in_grid.x;
    y[i] = a[elem_to_loc(i, a_shape, a_strides, a_ndim)] * b[1] + c;
    """
    a = mx.random.normal((3, 5))
    y = run(body, a.T, mx.array([0.0, 2.0]), mx.array(1.0))
    assert mx.allclose(y, a.T * 2 + 1)


def test_init_value_fills_what_the_kernel_leaves():
    body = "uint i = thread_position_in_grid.x; if (i % 2) y[i] = a[i];"
    assert run(body, mx.ones((4,)), init_value=5.0).tolist() == [5, 1, 5, 1]
    for poison in (None, float("nan")):
        with pytest.raises(KernelFault, match="never writes 8 bytes of `y`"):
            run(body, mx.ones((4,)), init_value=poison)


@pytest.mark.parametrize(
    ("text", "hits"),
    [
        ("void f(const device float* x);", 0),
        ("thread auto& y = z;", 0),
        ("float a = b * c; int d = e & f;", 0),
        ("(const device uint8_t*)w", 0),
        ("static constant constexpr const int M = 2;", 0),
        ("void f() { constexpr int n = 3; const int k = n; }", 0),
        ("// double* p", 0),
        ("double x;", 1),
        ("auto twice = [](float v) { return v + v; };", 1),
        ("void f(float* x);", 1),
        ("(float*)p", 1),
        ("const int N = 4;", 1),
        ("struct S { constexpr int a = 1; };", 1),
    ],
)
def test_words_are_linted(text, hits):
    assert len(lint_words(text)) == hits
