"""The emulator itself: what its library computes, how threads are laid out, how it is called."""

import mlx.core as mx
import numpy as np
import pytest

from . import Checks, KernelFault, why_not
from .lint import lint_words
from .samples import CUDA, METAL, run

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


# One line for each thing that the shim offers; both faces must compile all of it.
LIBRARY = """
  uint i = thread_position_in_grid.x;
  float x = a[i];
  T h = T(x);
  float s = 0.0f;
  s += exp(x) + exp2(x) + exp10(x) + log(x) + log2(x) + log10(x) + sin(x) + cos(x) + tan(x);
  s += asin(x) + acos(x) + atan(x) + sinh(x) + cosh(x) + tanh(x) + asinh(x) + atanh(x / 4.0f);
  s += sqrt(x) + rsqrt(x) + fabs(x) + floor(x) + ceil(x) + round(x) + rint(x) + trunc(x);
  s += sign(x) + fract(x) + saturate(x) + pow(x, 2.0f) + powr(x, 2.0f) + fmod(x, 3.0f);
  s += atan2(x, 2.0f) + fmin(x, 2.0f) + fmax(x, 2.0f) + copysign(x, -1.0f) + fdim(x, 1.0f);
  s += fma(x, x, x) + mix(x, 2.0f, 0.5f) + step(x, 1.0f) + min(x, 2.0f) + max(x, 2.0f);
  s += clamp(x, 0.0f, 1.0f) + abs(x) + select(x, 1.0f, true) + metal::precise::exp(x);
  s += metal::fast::exp(x) + float(exp(h)) + float(max(h, T(1))) + float(-h) + float(h * h);
  s += float(isnan(x)) + float(isinf(x)) + float(isfinite(x)) + as_type<float>(as_type<uint>(x));
  s += float(popcount(i) + clz(i) + ctz(i) + mulhi(i, i));
  float4 v = float4(x, 2.0f, 3.0f, 4.0f);
  v = v * v + v - v / v;
  v *= 2.0f;
  float2 pair = float2(v.x, v.y);
  uint3 whole = uint3(1, 2, 3);
  v.zw = v.xy;
  float3 three = v.xyz;
  s += v.z + v[3] + pair.x + three.y + three.xy.x + dot(v, v);
  s += float(whole.z) + float(short2(1, 2).y);
  s += simd_sum(x) + simd_product(x) + simd_max(x) + simd_min(x) + float(simd_and(i) + simd_or(i));
  s += float(simd_xor(i)) + simd_prefix_inclusive_sum(x) + simd_prefix_exclusive_sum(x);
  s += simd_broadcast_first(x) + simd_broadcast(x, 3) + simd_shuffle(x, 5) + simd_shuffle_xor(x, 1);
  s += simd_shuffle_up(x, 1) + simd_shuffle_down(x, 1) + simd_shuffle_rotate_up(x, 1);
  s += simd_shuffle_rotate_down(x, 1) + quad_sum(x) + quad_max(x) + quad_min(x) + quad_product(x);
  s += quad_broadcast(x, 1) + quad_shuffle(x, 1) + quad_shuffle_xor(x, 1);
  s += float(simd_all(true)) + float(simd_any(false)) + float(ulong(simd_ballot(true)) >> 31);
  s += float(simd_is_first());
  s += metal::numeric_limits<float>::epsilon() + float(Limits<int>::max - Limits<int>::max);
  s += INFINITY > x ? M_PI_F : NAN;
  threadgroup int box[2];
  threadgroup atomic_uint count;
  if (i == 0) box[0] = 0;
  if (i == 0) atomic_store_explicit(&count, 0u, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
  simdgroup_barrier(mem_flags::mem_none);
  atomic_fetch_add_explicit(&count, 1u, memory_order_relaxed);
  atomic_fetch_max_explicit(&count, 1u, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  s += float(atomic_load_explicit(&count, memory_order_relaxed)) + float(box[0]);
  simdgroup_matrix<T, 8, 8> left = make_filled_simdgroup_matrix<T, 8, 8>(T(1)), right(T(2));
  simdgroup_float8x8 sum(0.0f);
  simdgroup_multiply_accumulate(sum, left, right, sum);
  s += sum.thread_elements()[0];
  y[i] = s;
"""


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_both_faces_offer_the_whole_library(dtype):
    y = run(LIBRARY, mx.linspace(0.1, 0.9, 32), template=[("T", dtype)])
    assert mx.isfinite(y).all()


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


@pytest.mark.parametrize("sample", [METAL, CUDA], ids=["metal", "cuda"])
def test_a_call_can_be_compiled_and_not_run(sample):
    """At the size of a real model: types, launch and threadgroup memory are checked."""
    kernel = sample.kernel()
    kernel.compile_only = True
    rows, width = 4096, 12288
    call = {
        "inputs": [mx.zeros((rows, width)), mx.zeros((width,)), mx.array([1.0])],
        "template": [("T", mx.float32), ("ROWS", 2), ("SIMDGROUPS", 8), ("N", rows), ("K", width)],
        "grid": (rows // 2 * 256, 1, 1),
        "threadgroup": (256, 1, 1),
        "output_shapes": [(rows,)],
        "output_dtypes": [mx.float32],
    }
    assert kernel(**call)[0].shape == (rows,)
    report = kernel.reports[-1]
    assert (report.threadgroup_bytes, report.threads_per_group, report.groups) == (32, 256, 2048)
    assert report.accesses == 0
    large = sample.planted(("parts[SIMDGROUPS];", "parts[12289];")).kernel()
    large.compile_only = True
    with pytest.raises(KernelFault, match="threadgroup memory: .* 49168 bytes"):
        large(**call)


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
        ("void f(float* x);", 1),
        ("(float*)p", 1),
        ("const int N = 4;", 1),
        ("struct S { constexpr int a = 1; };", 1),
    ],
)
def test_words_are_linted(text, hits):
    assert len(lint_words(text)) == hits
