"""nvfp4 with a global scale as a format of weights: as compressed-tensors stores it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import mlx.nn as nn

from ..nn.frozen_weight import LARGEST_NVFP4
from ..nn.lora import is_switch_linear
from ..nn.nvfp4 import GROUP_SIZE, NVFP4Embedding, NVFP4Linear, NVFP4SwitchLinear, dequantized
from ..runtime import mx
from .weight_formats import CustomFormat, Shape, Tensors, by_slices, part_name

_PARTS = ("weight", "block_scales", "global_scale")


@dataclass(frozen=True)
class GlobalNVFP4Format(CustomFormat):
    """nvfp4 whose scales are divided by one float32, so that they fit E4M3."""

    mode: str = field(default="nvfp4-global", init=False)
    bits: int = field(default=4, init=False)
    group_size: int = field(default=GROUP_SIZE, init=False)

    def faults(self) -> list[str]:
        return []

    def holds(self, kind: str) -> bool:
        return True

    def nbytes(self, shape: Shape, scale_itemsize: int) -> int:
        count = math.prod(shape)
        global_scales = math.prod(shape[:-2])
        return count // 2 + count // GROUP_SIZE + 4 * global_scales

    def arrays(self, w: mx.array) -> Tensors:
        largest = _largest(w)
        codes, scales = _quantized(w, largest)
        return dict(zip(_PARTS, (codes, scales, LARGEST_NVFP4 / largest), strict=True))

    def quantize(self, name: str, w: mx.array, layout: str = "mlx") -> Tensors:
        largest = _largest(w)
        codes, scales = by_slices(name, w, 1, lambda rows: _quantized(rows, largest))
        names = [part_name(name, part) for part in _PARTS]
        return dict(zip(names, (codes, scales, LARGEST_NVFP4 / largest), strict=True))

    def dequantize(self, tensors: Tensors, dtype: mx.Dtype) -> mx.array:
        return dequantized(*tensors.values(), dtype)

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, mx.array]) -> "GlobalNVFP4Format":
        return cls()

    def module_of(
        self, dense: nn.Module, arrays: Mapping[str, mx.array], dtype: mx.Dtype
    ) -> nn.Module:
        parts = tuple(arrays[part] for part in _PARTS)
        if isinstance(dense, nn.Embedding):
            return NVFP4Embedding(parts, dtype)
        if is_switch_linear(dense):
            return NVFP4SwitchLinear(parts, dense.get("bias"), dtype)
        return NVFP4Linear(parts, dense.get("bias"), dtype)


def _largest(w: mx.array) -> mx.array:
    """The largest magnitude, float32 [1]; 1 where all weights are 0."""
    largest = mx.abs(w).max().astype(mx.float32).reshape(1)
    return mx.where(largest > 0, largest, 1.0)


def _quantized(w: mx.array, largest: mx.array) -> tuple[mx.array, ...]:
    return tuple(mx.quantize(w, GROUP_SIZE, 4, "nvfp4", global_scale=largest))
