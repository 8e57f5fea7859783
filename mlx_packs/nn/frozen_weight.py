"""What a frozen weight is stored as: dense, in one of MLX's quantized formats, or another.

A format that MLX lacks has modules derived from `CustomLinear` and `CustomEmbedding`, and a
`FrozenWeight` in `FROZEN`; `nn/nf4.py` has both.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..ops.matmul import sliced_matmul
from ..ops.profile import profile

Product = Callable[[mx.array], mx.array]
LARGEST_NVFP4 = 6.0 * 448.0  # code times scale; a global scale of MLX is the largest weight


class FrozenWeight(ABC):
    """The weight [out, in] of a linear or embedding, or [E, out, in] of a stack of experts.

    Attributes:
        bits: of a number; None where it is dense.
        group_size: numbers that share a scale; None where it is dense.
        mode: the name of the format; None where it is dense.
    """

    bits: int | None = None
    group_size: int | None = None
    mode: str | None = None

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """[out, in]."""

    @property
    @abstractmethod
    def dtype(self) -> mx.Dtype:
        """Of the weight when it is dense."""

    @abstractmethod
    def check(self) -> None:
        """Check that its tensors fit each other; a ValueError says what does not."""

    @abstractmethod
    def dense(self) -> mx.array:
        """Return the dense weight in `dtype`."""

    @abstractmethod
    def rows(self, at: slice | mx.array) -> mx.array:
        """Return some dense rows."""

    def product(self, x: mx.array) -> mx.array:
        """Return ``x @ W.T`` from the stored form; here slices of rows are dense meanwhile."""

        def rows(start: int, stop: int, after: mx.array) -> mx.array:
            at = mx.depends(mx.arange(start, stop), after)
            return self.rows(at).astype(after.dtype)

        return sliced_matmul(x, self.shape, rows)

    def transient_product(self, x: mx.array) -> mx.array:
        """Return ``x @ W.T`` from a weight that is dense for this use, with a gradient for x."""
        return self.product(x)

    def slice_products(self, start: int, stop: int) -> tuple[Product, Product]:
        """Return ``h @ W[start:stop].T`` and ``p @ W[start:stop]`` as functions of h and of p."""
        return self.dense_slice_products(start, stop)

    def dense_slice_products(self, start: int, stop: int) -> tuple[Product, Product]:
        """Return the same, from rows that are dense while they are used."""
        weight = self.rows(slice(start, stop))

        return lambda h: h @ weight.astype(h.dtype).T, lambda p: p @ weight.astype(p.dtype)

    def first_rows(self, count: int) -> nn.Module:
        """Return a module with the first rows of the weight and no others."""
        part = copy.copy(self.module)
        for name, rows in self._row_counts(count).items():
            if name in part:
                part[name] = part[name][:rows]
        return part

    def _row_counts(self, count: int) -> dict[str, int]:
        """Return how much of each array belongs to the first rows; others have no rows."""
        arrays = [name for name, value in self.module.items() if isinstance(value, mx.array)]
        rows = self.module.weight.shape[:1]
        return {name: count for name in arrays if self.module[name].shape[:1] == rows}


class DenseWeight(FrozenWeight):
    @property
    def shape(self) -> tuple[int, int]:
        return self.module.weight.shape[-2:]

    @property
    def dtype(self) -> mx.Dtype:
        return self.module.weight.dtype

    def check(self) -> None:
        """Accept every weight."""

    def dense(self) -> mx.array:
        return self.module.weight

    def rows(self, at: slice | mx.array) -> mx.array:
        return self.module.weight[at]

    def product(self, x: mx.array) -> mx.array:
        return profile().matmul(x, self.module.weight)


class QuantizedWeight(FrozenWeight):
    """A weight whose module says how it is quantized."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.bits = self.module.bits
        self.group_size = self.module.group_size
        self.mode = self.module.mode


class MLXWeight(QuantizedWeight):
    @property
    def shape(self) -> tuple[int, int]:
        outputs, words = self.module.weight.shape[-2:]
        return outputs, words * 32 // self.bits

    @property
    def dtype(self) -> mx.Dtype:
        if self.mode == "affine":
            return self.module.scales.dtype

        # other scales are bytes, and MLX's modules do not know the dtype of activations
        return getattr(self.module, "dense_dtype", mx.bfloat16)

    def check(self) -> None:
        *stack, outputs, words = self.module.weight.shape
        width, odd = divmod(words * 32, self.bits)
        expected = [*stack, outputs, width // self.group_size]

        parts = {"scales": self.module.scales}
        if self.mode == "affine" or self.module.get("biases") is not None:
            parts["biases"] = self.module.get("biases")

        for name, tensor in parts.items():
            shape = list(tensor.shape) if tensor is not None else None
            if odd or width % self.group_size or shape != expected:
                raise ValueError(
                    f"weight {list(self.module.weight.shape)} at {self.bits} bits, group "
                    f"{self.group_size} asks for {name} {expected}, but they are {shape}."
                )

    def dense(self) -> mx.array:
        return self._scaled(self._dequantized(self._arrays(self.module)))

    def rows(self, at: slice | mx.array) -> mx.array:
        return self._dequantized(self._rows_of_arrays(at))

    def product(self, x: mx.array) -> mx.array:
        return mx.quantized_matmul(x, *self._arrays(self.module), **self._format)

    def transient_product(self, x: mx.array) -> mx.array:
        def rows(start: int, stop: int, after: mx.array) -> mx.array:
            arrays = mx.depends(self._rows_of_arrays(slice(start, stop)), after)
            return self._dequantized(arrays).astype(after.dtype)

        return sliced_matmul(x, self.shape, rows)

    def slice_products(self, start: int, stop: int) -> tuple[Product, Product]:
        arrays = self._rows_of_arrays(slice(start, stop))
        return (
            lambda h: mx.quantized_matmul(h, *arrays, **self._format),
            lambda p: mx.quantized_matmul(p, *arrays, transpose=False, **self._format),
        )

    def _scaled(self, dense: mx.array) -> mx.array:
        """Multiply experts in nvfp4 by their ``global_scale`` [E], if mlx-lm gave them one."""
        largest = self.module.get("global_scale")
        if largest is None:
            return dense
        return (dense * (largest / LARGEST_NVFP4)[:, None, None]).astype(dense.dtype)

    @property
    def _format(self) -> dict[str, Any]:
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}

    @staticmethod
    def _arrays(module: nn.Module) -> tuple[mx.array, mx.array, mx.array | None]:
        return module["weight"], module["scales"], module.get("biases")

    def _rows_of_arrays(self, at: slice | mx.array) -> list[mx.array]:
        return [array[at] for array in self._arrays(self.module) if array is not None]

    def _dequantized(self, arrays: Sequence[mx.array | None]) -> mx.array:
        weight, scales, *biases = arrays
        bias = next(iter(biases), None)
        settings = (self.group_size, self.bits, self.mode)
        return profile().dequantize(weight, scales, bias, *settings, self.dtype)


class FloatingEmbedding(nn.QuantizedEmbedding):
    """An embedding in mxfp4, nvfp4 or mxfp8; rows of MLX's own are bfloat16 whatever follows."""

    def __call__(self, tokens: mx.array) -> mx.array:
        return frozen_weight(self).rows(tokens)


def with_dense_dtype(module: nn.Module, dtype: mx.Dtype) -> nn.Module:
    """Let a module in mxfp4, nvfp4 or mxfp8 be dense in ``dtype``: in place, but for embeddings."""
    if getattr(module, "mode", "affine") == "affine" or isinstance(module, CustomWeight):
        return module

    if type(module) is nn.QuantizedEmbedding:
        embedding = FloatingEmbedding.__new__(FloatingEmbedding)
        vars(embedding).update(vars(module))
        dict.update(embedding, module)
        module = embedding

    module.dense_dtype = dtype
    return module


class CustomWeight(nn.Module):
    """A frozen module whose weight is in a quantized format that MLX lacks."""

    mode: str  # of `config.choices.WEIGHT_MODES`
    bits: int  # of a number
    group_size: int  # numbers that share a scale


class CustomLinear(CustomWeight):
    """A linear with such a weight [O, D] and perhaps a ``bias`` [O]."""

    def __call__(self, x: mx.array) -> mx.array:
        y = frozen_weight(self).product(x)
        if "bias" in self:
            y = y + self.bias
        return y


class CustomEmbedding(CustomWeight):
    """An embedding with such a table [V, D]; rows are dequantized as they are looked up."""

    def __call__(self, tokens: mx.array) -> mx.array:
        return frozen_weight(self).rows(tokens)

    def as_linear(self, x: mx.array) -> mx.array:
        return frozen_weight(self).product(x)


FROZEN: dict[type[nn.Module], type[FrozenWeight]] = {}  # of modules with a `CustomWeight`


def frozen_weight(module: nn.Module) -> FrozenWeight:
    """Return what a linear, an embedding or a stack of experts stores; an adapted one's own."""
    while "linear" in module:
        module = module["linear"]

    for kind in type(module).__mro__:
        if kind in FROZEN:
            return FROZEN[kind](module)
    if "scales" in module:
        return MLXWeight(module)
    return DenseWeight(module)
