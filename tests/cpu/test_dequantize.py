"""Dequantizing by array operations is bit-identical to MLX's own."""

from dataclasses import replace

import pytest

from mlx_packs.cpu.profile import CPU
from mlx_packs.runtime import mx


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_dequantize_is_bit_identical_to_mlx(bits, group_size):
    quantized = mx.quantize(mx.random.normal((70, 384)), group_size, bits)
    for part in (
        quantized,
        [p[3:41] for p in quantized],
        [p[mx.array([7, 0, 7])] for p in quantized],
    ):
        expected = mx.dequantize(*part, group_size=group_size, bits=bits)
        result = CPU.dequantize(*part, group_size, bits, "affine")
        assert result.dtype == expected.dtype and mx.array_equal(result, expected).item()


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("shape", [(70, 384), (5, 14, 384)])
def test_slices_and_stacks_are_dequantized_as_the_whole(shape, streams):
    quantized = mx.quantize(mx.random.normal(shape), 32, 6)
    sliced = replace(CPU, slice_weights=16 * 384, streams=streams)
    result = sliced.dequantize(*quantized, 32, 6, "affine")
    assert mx.array_equal(result, mx.dequantize(*quantized, 32, 6)).item()


@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4", "mxfp8"])
def test_dequantize_of_other_modes_is_mlxs_own(mode):
    weight, scales = mx.quantize(mx.random.normal((8, 128)), mode=mode)
    group, bits = {"mxfp4": (32, 4), "nvfp4": (16, 4), "mxfp8": (32, 8)}[mode]
    expected = mx.dequantize(weight, scales, mode=mode)
    result = CPU.dequantize(weight, scales, None, group, bits, mode)
    assert result.dtype == expected.dtype and mx.array_equal(result, expected).item()


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_dequantize_on_a_cpu_is_vectorized(monkeypatch, bits):
    quantized = mx.quantize(mx.random.normal((4, 64)), 64, bits)
    monkeypatch.setattr(mx, "dequantize", None)
    CPU.dequantize(*quantized, 64, bits, "affine")
