"""Formats of quantized weights: one class per kind, and the registry of those written here.

A format turns a dense weight into the tensors that store it on disk, and back. To add one, write
its class, register it in `CLASSES` and `FORMATS`, and name it in `config.choices`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import ClassVar

import mlx.nn as nn

from ..config.choices import WEIGHT_FORMATS, WEIGHT_MODES, registered
from ..errors import PackError, did_you_mean
from ..nn.nf4 import NF4Embedding, NF4Linear
from ..ops import nf4
from ..ops.nf4 import BLOCK_SIZES, NESTED_BLOCK_SIZE, NF4Weight
from ..runtime import dtype_name, mx
from .bitsandbytes import to_bitsandbytes

Shape = tuple[int, ...]
Tensors = dict[str, mx.array]

AFFINE_BITS = (2, 3, 4, 5, 6, 8)
AFFINE_GROUP_SIZES = (32, 64, 128)
_SLICE = 1 << 20  # weights that are quantized at a time
_INFINITY = {  # bits without the sign; larger values are NaN
    mx.float32: (mx.uint32, 0x7F800000),
    mx.bfloat16: (mx.uint16, 0x7F80),
    mx.float16: (mx.uint16, 0x7C00),
}


@dataclass(frozen=True)
class WeightFormat(ABC):
    """How a weight is quantized."""

    mode: str  # its name in config.json
    bits: int  # of a code
    group_size: int  # weights that share a scale
    native: ClassVar[bool]  # whether MLX's own modules multiply by it

    @property
    def divisor(self) -> int:
        """A number that must divide the width of a weight."""
        return self.group_size

    @abstractmethod
    def faults(self) -> list[str]:
        """Return what is wrong with the settings, in the words of the command line."""

    @abstractmethod
    def nbytes(self, shape: Shape, scale_itemsize: int) -> int:
        """Return the bytes of all arrays that `outline` gives for a weight of this shape.

        ``scale_itemsize``: bytes of a scale that has the dtype of the weights.
        """

    @abstractmethod
    def outline(self, name: str, w: mx.array, layout: str = "mlx") -> Tensors:
        """Return the outline of `quantize`'s result, as lazy zeros: names, shapes and dtypes."""

    @abstractmethod
    def quantize(self, name: str, w: mx.array, layout: str = "mlx") -> Tensors:
        """Return the tensors that store a weight called ``name`` (with its ``.weight``).

        Slices of rows are quantized and evaluated one after another: beside the weight and the
        result, a few times a million weights are in memory. NaN and infinity are errors.

        ``w`` is [O, D], for native formats also [E, O, D]; ``layout`` is ``mlx``, or
        ``bitsandbytes`` for the names that transformers reads.
        """

    @abstractmethod
    def dequantize(self, tensors: Tensors, dtype: mx.Dtype) -> mx.array:
        """Return the weight that the tensors of `quantize` store, with scales in ``dtype``."""

    @abstractmethod
    def rounded(self, w: mx.array) -> mx.array:
        """Return a dense weight as it is after quantizing, lazily and in its own dtype."""

    @abstractmethod
    def module(self, dense: nn.Module, dtype: mx.Dtype) -> nn.Module:
        """Return a frozen module with the weight of a dense one, quantized lazily.

        The weight is quantized in its own dtype, as `quantize` does; scales are then in ``dtype``,
        that of activations. A bias is kept. For a linear no random number is drawn.
        """

    def fits(self, width: int) -> bool:
        """Return whether rows of this width can be quantized so."""
        return width % self.divisor == 0

    def holds(self, kind: str) -> bool:
        """Return whether it supports a ``linear``, an ``embedding`` or ``other`` (stacked experts)."""
        return self.native or kind != "other"

    def to_config(self) -> dict:
        """Return it as config.json spells it."""
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}

    def is_stored(self, quantization: Mapping) -> bool:
        """Return whether asking for it of a checkpoint that is quantized so leaves it as it is."""
        return False

    @property
    def bits_per_weight(self) -> float:
        """Bits of a weight with its share of scales, in half precision."""
        return 8 * self.nbytes((1 << 20,), 2) / (1 << 20)


@dataclass(frozen=True)
class MLXFormat(WeightFormat):
    """The result of `mx.quantize`: codes, a scale for each group and, if affine, a bias for each."""

    mode: str = "affine"
    bits: int = 4
    group_size: int = 64
    native = True

    def faults(self) -> list[str]:
        """Return what is wrong with the bits or the group size."""
        if self.mode != "affine":
            return []
        faults = _fault("--group-size", self.group_size, AFFINE_GROUP_SIZES)
        return faults + _fault("--bits", self.bits, AFFINE_BITS)

    def nbytes(self, shape: Shape, scale_itemsize: int) -> int:
        """Return the bytes of codes, scales and biases."""
        count = math.prod(shape)
        scales = 2 * scale_itemsize if self.mode == "affine" else 1  # others have 8-bit scales
        return count * self.bits // 8 + scales * (count // self.group_size)

    def outline(self, name: str, w: mx.array, layout: str = "mlx") -> Tensors:
        """Return the outline of `quantize`'s result, as lazy zeros."""
        return _native_names(name, self._quantize(mx.zeros(w.shape, w.dtype)))

    def quantize(self, name: str, w: mx.array, layout: str = "mlx") -> Tensors:
        """Return codes, scales and biases."""
        return _native_names(name, _by_slices(name, w, 1, self._quantize))

    def dequantize(self, tensors: Tensors, dtype: mx.Dtype) -> mx.array:
        """Return the dense weight; 8-bit scales stay as they are."""
        codes, *scales = tensors.values()
        if self.mode == "affine":
            scales = [scale.astype(dtype) for scale in scales]
        return self._dequantize(codes, *scales).astype(dtype)

    def rounded(self, w: mx.array) -> mx.array:
        """Return a dense weight as it is after quantizing."""
        return self._dequantize(*self._quantize(w)).astype(w.dtype)

    def module(self, dense: nn.Module, dtype: mx.Dtype) -> nn.Module:
        """Return MLX's own module."""
        if isinstance(dense, nn.Linear):
            module = nn.QuantizedLinear.__new__(nn.QuantizedLinear)
            nn.Module.__init__(module)  # its own would draw weights
            module.group_size, module.bits, module.mode = self.group_size, self.bits, self.mode
            arrays = self._quantize(dense.weight)
            for name, array in zip(("weight", "scales", "biases"), arrays, strict=False):
                module[name] = array
            if "bias" in dense:
                module.bias = dense.bias
        else:
            module = dense.to_quantized(self.group_size, self.bits, self.mode)
        if self.mode == "affine":
            module.scales, module.biases = (
                module[name].astype(dtype) for name in ("scales", "biases")
            )
        module.freeze()
        return module

    def _quantize(self, w: mx.array) -> tuple[mx.array, ...]:
        return tuple(mx.quantize(w, self.group_size, self.bits, self.mode))

    def _dequantize(self, *arrays: mx.array) -> mx.array:
        return mx.dequantize(*arrays, group_size=self.group_size, bits=self.bits, mode=self.mode)


@dataclass(frozen=True)
class NF4Format(WeightFormat):
    """4-bit NormalFloat in blocks that may go across rows; with ``double_quant`` absmax in 8 bits.

    QLoRA: https://arxiv.org/abs/2305.14314
    """

    mode: str = field(default="nf4", init=False)
    bits: int = field(default=4, init=False)
    group_size: int = 64
    double_quant: bool = True
    native = False

    @property
    def divisor(self) -> int:
        """Two codes share a byte."""
        return 2

    def faults(self) -> list[str]:
        """Return what is wrong with the block size."""
        return _fault("--group-size", self.group_size, BLOCK_SIZES)

    def nbytes(self, shape: Shape, scale_itemsize: int) -> int:
        """Return the bytes of codes and absmax, which are float32 or 8-bit."""
        count = math.prod(shape)
        blocks = -(-count // self.group_size)
        if not self.double_quant:
            return count // 2 + 4 * blocks
        return count // 2 + blocks + 4 * -(-blocks // NESTED_BLOCK_SIZE) + 4

    def outline(self, name: str, w: mx.array, layout: str = "mlx") -> Tensors:
        """Return the outline of `quantize`'s result, as lazy zeros."""
        codes = mx.zeros((w.shape[0], w.shape[1] // 2), mx.uint8)
        blocks = -(-w.size // self.group_size)
        absmax = [mx.zeros(blocks)]
        if self.double_quant:
            nested = mx.zeros(-(-blocks // NESTED_BLOCK_SIZE))
            absmax = [mx.zeros(blocks, mx.uint8), nested, mx.zeros(1)]
        weight = NF4Weight(codes, *absmax, block_size=self.group_size)
        return _nf4_names(name, weight, dtype_name(w.dtype), layout)

    def quantize(self, name: str, w: mx.array, layout: str = "mlx") -> Tensors:
        """Return codes and absmax."""

        def codes_and_absmax(rows: mx.array) -> tuple[mx.array, mx.array]:
            part = nf4.quantize(rows, self.group_size, double_quant=False)
            return part.weight, part.absmax

        rows_of_whole_blocks = self.group_size // math.gcd(self.group_size, w.shape[-1])
        arrays = _by_slices(name, w, rows_of_whole_blocks, codes_and_absmax)
        weight = NF4Weight(*arrays, block_size=self.group_size)
        if self.double_quant:
            weight = nf4.quantize_absmax(weight)
        return _nf4_names(name, weight, dtype_name(w.dtype), layout)

    def dequantize(self, tensors: Tensors, dtype: mx.Dtype) -> mx.array:
        """Return the dense weight in ``dtype``."""
        weight = NF4Weight(*tensors.values(), block_size=self.group_size)
        return nf4.dequantize(weight, dtype)

    def rounded(self, w: mx.array) -> mx.array:
        """Return a dense weight as it is after quantizing."""
        return nf4.dequantize(nf4.quantize(w, self.group_size, self.double_quant), w.dtype)

    def module(self, dense: nn.Module, dtype: mx.Dtype) -> nn.Module:
        """Return an NF4 module."""
        weight = nf4.quantize(dense.weight, self.group_size, self.double_quant)
        if isinstance(dense, nn.Embedding):
            return NF4Embedding(weight, dtype)
        return NF4Linear(weight, dense.get("bias"), dtype)

    def to_config(self) -> dict:
        """Return it as config.json spells it."""
        return super().to_config() | {"double_quant": self.double_quant}

    def is_stored(self, quantization: Mapping) -> bool:
        """Return whether a checkpoint is NF4, as written here or by bitsandbytes."""
        return "nf4" in (quantization.get("mode"), quantization.get("bnb_4bit_quant_type"))


def _fault(flag: str, value: int, valid: tuple[int, ...]) -> list[str]:
    return [] if value in valid else [f"{flag}: must be one of {valid} but is {value}."]


FORMATS: dict[str, WeightFormat] = registered(
    WEIGHT_FORMATS, {"affine4": MLXFormat(bits=4), "affine8": MLXFormat(bits=8), "nf4": NF4Format()}
)
CLASSES: dict[str, type[WeightFormat]] = registered(
    WEIGHT_MODES, {"nf4": NF4Format, "affine": MLXFormat}
)


def named_format(name: str, double_quant: bool = True) -> WeightFormat:
    """Return the format of a name of --quantize."""
    if name not in FORMATS:
        raise PackError(
            f"--quantize {name}: is not a format. {did_you_mean(name, list(FORMATS))}", "unknown"
        )
    weight_format = FORMATS[name]
    if isinstance(weight_format, NF4Format):
        return replace(weight_format, double_quant=double_quant)
    return weight_format


def specified_format(mode: str, **settings: int | bool | None) -> WeightFormat:
    """Return a format of a mode with these settings; None is the default of the format."""
    format_class = CLASSES[mode]
    specified = {name: value for name, value in settings.items() if value is not None}
    valid = {f.name for f in fields(format_class) if f.init}
    if misplaced := [name for name in specified if name not in valid]:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in misplaced)
        raise PackError(f"{flags}: not with --mode {mode}.", "conflict")
    return format_class(**specified)


def format_name(quantization: Mapping | None) -> str:
    """Return the name of the format that a config's quantization is in, or ``none``."""
    q = quantization or {}
    stored = q.get("mode", "affine"), q.get("bits"), q.get("group_size")
    for name, weight_format in FORMATS.items():
        if stored == (weight_format.mode, weight_format.bits, weight_format.group_size):
            return name
    return "none"


def format_of(module: nn.Module) -> WeightFormat | None:
    """Return the format of a module's weight; None if it is dense."""
    if isinstance(module, (NF4Linear, NF4Embedding)):
        return NF4Format(group_size=module.group_size, double_quant=module.double_quant)
    if "scales" not in module:
        return None
    return MLXFormat(getattr(module, "mode", "affine"), module.bits, module.group_size)


def check_finite(name: str, w: mx.array) -> None:
    """Check that all weights are finite: that no exponent has all of its bits set."""
    if w.dtype not in _INFINITY:
        return
    word, infinity = _INFINITY[w.dtype]
    bits = w.flatten().view(word)
    for start in range(0, bits.size, _SLICE):
        magnitudes = bits[start : start + _SLICE] & (2 ** (8 * word.size - 1) - 1)
        if magnitudes.max().item() >= infinity:
            raise PackError(
                f"{name}: has NaN or infinite weights. Such a model cannot be used.", "unreadable"
            )


def _by_slices(
    name: str, w: mx.array, multiple: int, quantize: Callable[[mx.array], tuple[mx.array, ...]]
) -> list[mx.array]:
    """Return the result of ``quantize`` for all rows, computed in slices of a multiple of so many rows.

    Slices are put in their place at once; to join them in the end would take the memory twice.
    """
    check_finite(name, w)
    results = [mx.zeros(part.shape, part.dtype) for part in quantize(w)]
    ends = [0] * len(results)
    rows = max(1, _SLICE // (w.size // len(w)) // multiple) * multiple
    for start in range(0, len(w), rows):
        for i, part in enumerate(quantize(w[start : start + rows])):
            results[i][ends[i] : ends[i] + len(part)] = part
            ends[i] += len(part)
        mx.eval(results)
    return results


def _native_names(name: str, arrays: tuple[mx.array, ...] | list[mx.array]) -> Tensors:
    path = name.removesuffix(".weight")
    return dict(zip((name, f"{path}.scales", f"{path}.biases"), arrays, strict=False))


def _nf4_names(name: str, weight: NF4Weight, dtype: str, layout: str) -> Tensors:
    if layout == "bitsandbytes":
        return to_bitsandbytes(name, weight, dtype)
    return weight.tensors(name.removesuffix(".weight"))
