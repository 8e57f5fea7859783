"""nvfp4 with a global scale as a format of weights: as compressed-tensors stores it."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import mlx.nn as nn

from ..nn.frozen_weight import LARGEST_NVFP4
from ..nn.lora import is_switch_linear
from ..nn.nvfp4 import GROUP_SIZE, NVFP4Embedding, NVFP4Linear, NVFP4SwitchLinear, dequantized
from ..runtime import mx
from .compressed_tensors import METHOD as LAYOUT
from .compressed_tensors import to_compressed_tensors
from .weight_formats import CustomFormat, Shape, Tensors, by_slices, part_name

_PARTS = ("weight", "block_scales", "global_scale")
_SLACK = 464 / 448  # scales up to 464 round to 448, the largest of E4M3
_log = logging.getLogger("mlx_packs")


@dataclass(frozen=True)
class GlobalNVFP4Format(CustomFormat):
    """nvfp4 whose scales are divided by one float32, so that they fit E4M3.

    ``global_scales`` are those of the base, one or one for each expert. A changed weight keeps its
    global scale while it fits: vLLM joins q, k and v to one weight, which has one global scale.
    """

    mode: str = field(default="nvfp4-global", init=False)
    bits: int = field(default=4, init=False)
    group_size: int = field(default=GROUP_SIZE, init=False)
    global_scales: tuple[float, ...] = ()
    layouts = ("mlx", LAYOUT)

    def faults(self) -> list[str]:
        return []

    def holds(self, kind: str) -> bool:
        return True

    def nbytes(self, shape: Shape, scale_itemsize: int) -> int:
        count = math.prod(shape)
        global_scales = math.prod(shape[:-2])
        return count // 2 + count // GROUP_SIZE + 4 * global_scales

    def arrays(self, w: mx.array) -> Tensors:
        global_scales = _global_scales(w)
        codes, scales = _quantized(w, LARGEST_NVFP4 / global_scales)
        return dict(zip(_PARTS, (codes, scales, global_scales), strict=True))

    def outline(self, name: str, w: mx.array, layout: str = "mlx") -> Tensors:
        stack = w.shape[:-2] or (1,)
        codes = mx.zeros((*w.shape[:-1], w.shape[-1] // 8), mx.uint32)
        scales = mx.zeros((*w.shape[:-1], w.shape[-1] // GROUP_SIZE), mx.uint8)
        return _named(name, (codes, scales, mx.zeros(stack)), layout)

    def quantize(self, name: str, w: mx.array, layout: str = "mlx") -> Tensors:
        if w.ndim == 2:
            return _named(name, self._quantized_by_slices(name, w, 0), layout)

        experts = [self._quantized_by_slices(name, expert, i) for i, expert in enumerate(w)]
        codes, scales, global_scales = zip(*experts, strict=True)
        stacked = (mx.stack(codes), mx.stack(scales), mx.concatenate(global_scales))
        return _named(name, stacked, layout)

    def _quantized_by_slices(self, name: str, w: mx.array, expert: int) -> tuple[mx.array, ...]:
        """Codes, scales and the global scale [1] of one weight."""
        global_scale = _global_scales(w)
        if self.global_scales:
            kept = mx.array([self.global_scales[expert]])
            if (global_scale * _SLACK >= kept).item():
                global_scale = kept
            else:
                say_other_scale()

        largest = LARGEST_NVFP4 / global_scale
        codes, scales = by_slices(name, w, 1, lambda rows: _quantized(rows, largest))
        return codes, scales, global_scale

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


def _global_scales(w: mx.array) -> mx.array:
    """The largest global scale that a weight's scales fit E4M3 with, float32 [1] or [E]."""
    largest = mx.abs(w).max(axis=(-2, -1)).astype(mx.float32).reshape(-1)
    return LARGEST_NVFP4 / mx.where(largest > 0, largest, 1.0)


def _quantized(w: mx.array, largest: mx.array) -> tuple[mx.array, ...]:
    return tuple(mx.quantize(w, GROUP_SIZE, 4, "nvfp4", global_scale=largest))


def _named(name: str, arrays: tuple[mx.array, ...], layout: str) -> Tensors:
    tensors = dict(zip(_PARTS, arrays, strict=True))
    if layout == LAYOUT:
        return to_compressed_tensors(name.removesuffix(".weight"), tensors)
    return {part_name(name, part): array for part, array in tensors.items()}


@lru_cache(maxsize=1)
def say_other_scale() -> None:
    _log.warning(
        "Merged weights that are larger than the base's global scale permits get another one. vLLM "
        "computes less exactly where those of q, k and v, or of gate and up, differ."
    )
