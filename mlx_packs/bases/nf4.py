"""NF4 as a format of weights: as `packs quantize` and bitsandbytes write it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import mlx.nn as nn

from ..config.choices import WEIGHT_MODES
from ..nn.nf4 import NF4Embedding, NF4Linear
from ..ops import nf4
from ..ops.nf4 import BLOCK_SIZES, NESTED_BLOCK_SIZE, NF4Weight
from ..runtime import mx
from .weight_formats import CustomFormat, Shape, Tensors, by_slices, fault_of


@dataclass(frozen=True)
class NF4Format(CustomFormat):
    """4-bit NormalFloat in blocks that may go across rows; with ``double_quant`` absmax in 8 bits.

    QLoRA: https://arxiv.org/abs/2305.14314
    """

    mode: str = field(default="nf4", init=False)
    bits: int = field(default=4, init=False)
    group_size: int = 64
    double_quant: bool = True

    @property
    def divisor(self) -> int:
        """Two codes share a byte."""
        return 2

    def faults(self) -> list[str]:
        return fault_of("--group-size", self.group_size, BLOCK_SIZES)

    def nbytes(self, shape: Shape, scale_itemsize: int) -> int:
        """Absmax are float32 or 8-bit."""
        count = math.prod(shape)
        blocks = -(-count // self.group_size)
        if not self.double_quant:
            return count // 2 + 4 * blocks
        return count // 2 + blocks + 4 * -(-blocks // NESTED_BLOCK_SIZE) + 4

    def quantize(self, name: str, w: mx.array) -> Tensors:
        def codes_and_absmax(rows: mx.array) -> tuple[mx.array, mx.array]:
            part = nf4.quantize(rows, self.group_size, double_quant=False)
            return part.weight, part.absmax

        rows_of_whole_blocks = self.group_size // math.gcd(self.group_size, w.shape[-1])
        arrays = by_slices(name, w, rows_of_whole_blocks, codes_and_absmax)
        weight = NF4Weight(*arrays, block_size=self.group_size)
        if self.double_quant:
            weight = nf4.quantize_absmax(weight)
        return weight.tensors(name.removesuffix(".weight"))

    def dequantize(self, tensors: Tensors, dtype: mx.Dtype) -> mx.array:
        weight = NF4Weight(*tensors.values(), block_size=self.group_size)
        return nf4.dequantize(weight, dtype)

    def arrays(self, w: mx.array) -> Tensors:
        weight = nf4.quantize(w, self.group_size, self.double_quant)
        tensors = weight.tensors("")
        return {name.removeprefix("."): array for name, array in tensors.items()}

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, mx.array]) -> "NF4Format":
        """The default block size if none fits, or several do."""
        codes = arrays["weight"].size
        absmax = arrays["absmax"].size
        fitting = [size for size in BLOCK_SIZES if -(-2 * codes // size) == absmax]
        size = fitting[0] if len(fitting) == 1 else 64
        return cls(size, "nested_absmax" in arrays)

    def module_of(
        self, dense: nn.Module, arrays: Mapping[str, mx.array], dtype: mx.Dtype
    ) -> nn.Module:
        """The codes stay lazy."""
        parts = [arrays.get(name) for name in ("weight", *WEIGHT_MODES["nf4"].parts)]
        weight = NF4Weight(*parts, self.group_size)
        if isinstance(dense, nn.Embedding):
            return NF4Embedding(weight, dtype)
        return NF4Linear(weight, dense.get("bias"), dtype)

    def to_config(self) -> dict:
        return super().to_config() | {"double_quant": self.double_quant}

    def is_stored(self, quantization: Mapping) -> bool:
        """As written here or by bitsandbytes."""
        return "nf4" in (quantization.get("mode"), quantization.get("bnb_4bit_quant_type"))
