"""NF4Linear and NF4Embedding: frozen weights in 4-bit NormalFloat, called as MLX's own modules.

QLoRA: https://arxiv.org/abs/2305.14314
"""

import mlx.core as mx
import mlx.nn as nn

from ..ops import nf4
from ..ops.nf4 import NESTED_BLOCK_SIZE, NF4Weight
from ..ops.profile import tiles
from .frozen_weight import FROZEN, CustomEmbedding, CustomLinear, CustomWeight, QuantizedWeight


class _NF4Module(CustomWeight):
    """The arrays of an `NF4Weight`, by the names that a checkpoint has for them."""

    bits = 4
    mode = "nf4"

    def __init__(self, weight: NF4Weight, dtype: mx.Dtype = mx.bfloat16) -> None:
        super().__init__()
        self.weight = weight.weight
        self.absmax = weight.absmax
        if weight.double_quant:
            self.nested_absmax = weight.nested_absmax
            self.offset = weight.offset

        self.group_size = weight.block_size
        self.dtype = dtype
        self._nf4_weight = weight
        self.freeze()

    @property
    def nf4_weight(self) -> NF4Weight:
        """The weight as ops/nf4.py takes it; it changes when parameters are loaded."""
        known = self._nf4_weight
        if known.weight is not self.weight or known.absmax is not self.absmax:
            nested = self.get("nested_absmax"), self.get("offset")
            known = NF4Weight(self.weight, self.absmax, *nested, self.group_size)
            self._nf4_weight = known
        return known

    @property
    def double_quant(self) -> bool:
        """Whether the absmax are 8-bit codes."""
        return "nested_absmax" in self

    def _extra_repr(self) -> str:
        outputs, depth = self.nf4_weight.shape
        kind = "double-quantized" if self.double_quant else "float32 absmax"
        return f"input_dims={depth}, output_dims={outputs}, block={self.group_size}, {kind}"


class NF4Linear(_NF4Module, CustomLinear):
    """A frozen linear with an NF4 weight [O, D] and perhaps a bias [O].

    A dense weight, where one is needed, has ``dtype``; the product has the dtype of x.
    """

    def __init__(
        self, weight: NF4Weight, bias: mx.array | None = None, dtype: mx.Dtype = mx.bfloat16
    ) -> None:
        super().__init__(weight, dtype)
        if bias is not None:
            self.bias = bias
            self.freeze()

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, group_size: int = 64, double_quant: bool = True
    ) -> "NF4Linear":
        """Quantize a dense linear. Its width must be even."""
        weight = nf4.quantize(linear.weight, group_size, double_quant)
        return cls(weight, linear.get("bias"), linear.weight.dtype)


class NF4Embedding(_NF4Module, CustomEmbedding):
    """A frozen embedding table [V, D]; rows are dequantized as they are looked up."""


class FrozenNF4(QuantizedWeight):
    @property
    def shape(self) -> tuple[int, int]:
        return self.module.nf4_weight.shape

    @property
    def dtype(self) -> mx.Dtype:
        return self.module.dtype

    def check(self) -> None:
        try:
            _ = self.module.nf4_weight
        except ValueError as error:
            raise ValueError(f"its quantized tensors do not fit: {error}") from None

    def dense(self) -> mx.array:
        return nf4.dequantize(self.module.nf4_weight, self.module.dtype)

    def rows(self, at: slice | mx.array) -> mx.array:
        if isinstance(at, slice):
            at = mx.arange(at.start, at.stop)

        return nf4.rows(self.module.nf4_weight, at, self.module.dtype)

    def product(self, x: mx.array) -> mx.array:
        return nf4.matmul(x, self.module.nf4_weight)

    def _row_counts(self, count: int) -> dict[str, int]:
        blocks = tiles(count * self.shape[1], self.module.group_size)
        nested = tiles(blocks, NESTED_BLOCK_SIZE)
        return super()._row_counts(count) | {"absmax": blocks, "nested_absmax": nested}


FROZEN[_NF4Module] = FrozenNF4
