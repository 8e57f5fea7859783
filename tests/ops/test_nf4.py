"""NF4 weights: the definition written out in numpy, and the kernels against the reference."""

import numpy as np
import pytest

from mlx_packs.ops import _backend, blockwise, nf4, nf4_kernel
from mlx_packs.ops._check import examine
from mlx_packs.runtime import mx
from tests.ops.cases import by_dtype

LEVELS = np.array(
    (
        "-1.0 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 "
        "-0.28444138169288635 -0.18477343022823334 -0.09105003625154495 0.0 0.07958029955625534 "
        "0.16093020141124725 0.24611230194568634 0.33791524171829224 0.44070982933044434 "
        "0.5626170039176941 0.7229568362236023 1.0"
    ).split(),
    np.float32,
)
SHAPES = {  # O, D
    "whole_blocks": (6, 256),
    "blocks_across_rows": (7, 72),
    "rows_of_odd_bytes": (5, 90),
    "less_than_a_block": (1, 6),
    "two_nested_blocks": (40, 512),
}


def by_definition(quantized: nf4.NF4Weight) -> np.ndarray:
    """level * absmax of every element, in float32."""
    numbers = np.arange(2 * quantized.weight.size)
    byte = np.array(quantized.weight).ravel()[numbers // 2]
    codes = np.where(numbers % 2 == 0, byte // 16, byte % 16)
    absmax = np.array(quantized.absmax)
    if quantized.double_quant:
        nested = np.array(quantized.nested_absmax)[np.arange(absmax.size) // 256]
        absmax = dynamic_map()[absmax] * nested + np.array(quantized.offset)
    return (LEVELS[codes] * absmax[numbers // quantized.block_size]).reshape(quantized.shape)


def dynamic_map() -> np.ndarray:
    """bitsandbytes' create_dynamic_map(signed=True, max_exponent_bits=7, total_bits=8)."""
    values = [0.0, 1.0]
    for i in range(7):
        edges = np.linspace(0.1, 1, 2**i + 1)
        middles = 10.0 ** (i - 6) * (edges[1:] + edges[:-1]) / 2
        values += [*middles, *-middles]
    return np.sort(values).astype(np.float32)


def nearest(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    return np.abs(values[:, None] - table).argmin(axis=1)


def random_weight(name: str) -> mx.array:
    return mx.random.normal(SHAPES[name], key=mx.random.key(3))


def test_dynamic_map_is_that_of_bitsandbytes():
    values = np.array(blockwise.dynamic_map())
    assert values.shape == (256,) and values.dtype == np.float32 and (np.diff(values) > 0).all()
    assert np.allclose(values, dynamic_map(), rtol=3e-7, atol=0)
    # float32 as its published tables have it, where other orders of rounding give neighbours
    for published in (0.7117187976837158, 0.5148437023162842, 0.00038125002, 5.500000384017767e-07):
        assert {np.float32(published), -np.float32(published)} <= set(values)
    assert values[0] == np.float32(-0.992968738079071) and values[-1] == 1 and 0 in values


@pytest.mark.parametrize("block_size", nf4.BLOCK_SIZES)
@pytest.mark.parametrize("name", SHAPES)
def test_quantize_takes_the_nearest_level_and_the_nearest_absmax(name, block_size):
    w = random_weight(name)
    single = nf4.quantize(w, block_size, double_quant=False)
    flat = np.array(w).ravel()
    blocks = np.arange(flat.size) // block_size
    absmax = np.array([np.abs(flat[blocks == b]).max() for b in range(blocks[-1] + 1)])
    assert np.array_equal(np.array(single.absmax), absmax)
    codes = nearest(flat / absmax[blocks], LEVELS).reshape(-1, 2)
    assert np.array_equal(np.array(single.weight).ravel(), codes[:, 0] * 16 + codes[:, 1])

    double = nf4.quantize(w, block_size)
    assert mx.array_equal(double.weight, single.weight).item()
    offset = np.array(double.offset)
    assert np.allclose(offset, absmax.mean(), rtol=1e-6)
    left = absmax - offset
    for first in range(0, left.size, 256):
        part, number = left[first : first + 256], first // 256
        assert np.array(double.nested_absmax)[number] == np.abs(part).max()
        if left.size > 1:
            # bitsandbytes rounds to one of 65536 places first
            places = (part * (1 / np.abs(part).max()) + 1) * np.float32(0.5) * 65535
            places = np.floor(places + np.float32(0.5)) / 65535 * 2 - 1
            wanted = nearest(places, np.array(blockwise.dynamic_map()))
            assert np.array_equal(np.array(double.absmax)[first : first + 256], wanted)


@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("block_size", nf4.BLOCK_SIZES)
@pytest.mark.parametrize("name", SHAPES)
def test_dequantize_equals_the_definition(name, block_size, double_quant):
    quantized = nf4.quantize(random_weight(name), block_size, double_quant)
    dense = by_definition(quantized)
    assert np.allclose(np.array(nf4.dequantize(quantized, mx.float32)), dense, rtol=1e-6, atol=1e-7)
    for dtype in (mx.bfloat16, mx.float16):
        low = nf4.dequantize(quantized, dtype)
        assert low.dtype == dtype and low.shape == quantized.shape
        assert mx.allclose(low, mx.array(dense), rtol=mx.finfo(dtype).eps, atol=1e-6).item()


def test_quantize_of_a_normal_weight_is_close_in_4_127_bits():
    w = mx.random.normal((256, 512))
    for double_quant, bits in ((False, 4.5), (True, 4.127)):
        quantized = nf4.quantize(w, double_quant=double_quant)
        error = nf4.dequantize(quantized, mx.float32) - w
        assert (mx.sqrt((error**2).mean()) / mx.sqrt((w**2).mean())).item() < 0.1
        assert quantized.nbytes * 8 / w.size == pytest.approx(bits, abs=1e-3)


def test_matmul_equals_the_dense_product_with_its_gradient_for_x():
    quantized = nf4.quantize(random_weight("blocks_across_rows"))
    dense = mx.array(by_definition(quantized))
    x, cotangent = mx.random.normal((2, 3, 72)), mx.random.normal((2, 3, 7))
    (y,), (dx,) = mx.vjp(lambda x: nf4.matmul(x, quantized), [x], [cotangent])
    assert mx.allclose(y, x @ dense.T, atol=1e-5).item()
    assert mx.allclose(dx, cotangent @ dense, atol=1e-5).item()


def test_nf4_rejects_mismatched_arrays_naming_all_faults():
    quantized = nf4.quantize(random_weight("whole_blocks"))

    with pytest.raises(ValueError, match="'block_size' .* 48"):
        nf4.NF4Weight(quantized.weight, quantized.absmax, block_size=48)

    text = r"'absmax' .*uint8 \[24\] .*float32 \[3\].*'offset' .*None"
    with pytest.raises(ValueError, match=text):
        nf4.NF4Weight(quantized.weight, mx.zeros(3), quantized.nested_absmax)
    with pytest.raises(ValueError, match=r"x .*256.*3, 255"):
        nf4.matmul(mx.zeros((3, 255)), quantized)


WORKLOADS = {  # rows, D, O, block size, double quantization
    "decode_1": (1, 640, 40, 64, True),
    "two_rows_blocks_across_rows": (2, 72, 19, 32, False),
    "rows_of_odd_bytes": (3, 90, 43, 128, False),
    "ragged_11": (11, 266, 35, 256, True),
    "prefill_65": (65, 264, 43, 64, False),
    "fewer_than_8_inputs": (1, 6, 5, 64, True),
}


@pytest.mark.parametrize(("dtype", "name"), by_dtype(WORKLOADS, ("decode_1", "ragged_11")))
def test_nf4_kernels_pass_their_random_and_exact_checks(emulated, dtype, name):
    rows, depth, outputs, block_size, double_quant = WORKLOADS[name]
    call = nf4_kernel.instance_of(dtype, rows, (outputs, depth), block_size, double_quant).call
    for exact in (True, False):
        check = nf4_kernel.check_of(emulated.backend, call[0], rows, call[2], exact)
        assert examine(check).fault is None


@pytest.mark.parametrize("double_quant", [False, True])
def test_dequantize_and_matmul_run_their_kernels(emulated, double_quant):
    quantized = nf4.quantize(random_weight("blocks_across_rows"), double_quant=double_quant)
    dense = nf4.reference_dequantize(quantized, mx.float32)
    assert mx.allclose(nf4.dequantize(quantized, mx.float32), dense, rtol=1e-6).item()
    for rows in (3, nf4_kernel.MATVEC_ROWS + 1):
        x = mx.random.normal((rows, 1, 72))
        loss = mx.checkpoint(lambda x: (nf4.matmul(x, quantized) ** 2).sum())
        value, gradient = mx.value_and_grad(loss)(x)
        y = x @ dense.T
        assert mx.allclose(value, (y**2).sum(), rtol=1e-5).item()
        assert mx.allclose(gradient, 2 * y @ dense, atol=1e-3).item()
    kinds = sorted(text.split(",")[0] for text in _backend.record()["kernels"])
    assert kinds == ["nf4 dequantize", "nf4 matvec"]


def test_matmul_of_an_empty_batch_launches_no_product(emulated):
    quantized = nf4.quantize(random_weight("blocks_across_rows"))
    assert nf4.matmul(mx.zeros((0, 72)), quantized).shape == (0, 7)
    assert set(emulated.launches()) == {"mlx_packs_nf4_dequantize"}


def test_instances_cover_dtypes_double_quantization_and_rows(emulated):
    instances = nf4_kernel.instances()
    assert len({instance.name for instance in instances}) == len(instances) == 12
    one = next(i for i in instances if i.name == "bfloat16 nf4 double 2560 to 4096 rows 1")
    assert all(examine(check).fault is None for check in one.checks(emulated.backend))
    assert one.workload(emulated.backend).inputs[0].shape == (1, 2560)
