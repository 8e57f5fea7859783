"""Formats of quantized weights: one class per kind, found by the names of `config.choices`.

A format turns a dense weight into the tensors that store it on disk, and back. To add one, write
its class, and name it in `config.choices.WEIGHT_MODES` and `WEIGHT_FORMATS`.
"""

import math
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import ClassVar

import mlx.nn as nn

from ..config.choices import WEIGHT_FORMATS, WEIGHT_MODES
from ..errors import PackError, did_you_mean
from ..nn.frozen_weight import CustomWeight
from ..runtime import mx

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
    def outline(self, name: str, w: mx.array) -> Tensors:
        """Return the outline of `quantize`'s result, as lazy zeros: names, shapes and dtypes."""

    @abstractmethod
    def quantize(self, name: str, w: mx.array) -> Tensors:
        """Return the tensors that store a weight called ``name`` (with its ``.weight``).

        Slices of rows are quantized and evaluated one after another: beside the weight and the
        result, a few times a million weights are in memory. NaN and infinity are errors.

        ``w`` is [O, D], for native formats also [E, O, D].
        """

    @abstractmethod
    def dequantize(self, tensors: Tensors, dtype: mx.Dtype) -> mx.array:
        """Return the weight that the tensors of `quantize` store, with scales in ``dtype``."""

    @abstractmethod
    def rounded(self, w: mx.array) -> mx.array:
        """Return a dense weight as it is after quantizing, lazily and in its own dtype."""

    def fits(self, width: int) -> bool:
        """Return whether rows of this width can be quantized so."""
        return width % self.divisor == 0

    def holds(self, kind: str) -> bool:
        """Return whether a ``linear``, ``embedding`` or ``other`` (stacked experts) can have it."""
        return self.native or kind != "other"

    def to_config(self) -> dict:
        """Return it as config.json spells it."""
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}

    def is_stored(self, quantization: Mapping) -> bool:
        """Return whether a config.json's quantization is in this format."""
        return False

    @property
    def bits_per_weight(self) -> float:
        """Bits of a weight with its share of scales, in half precision."""
        return 8 * self.nbytes((1 << 20,), 2) / (1 << 20)


@dataclass(frozen=True)
class MLXFormat(WeightFormat):
    """The result of `mx.quantize`: codes, a scale per group and, if affine, a bias per group."""

    mode: str = "affine"
    bits: int = 4
    group_size: int = 64
    native = True

    def faults(self) -> list[str]:
        if self.mode != "affine":
            return []
        faults = fault_of("--group-size", self.group_size, AFFINE_GROUP_SIZES)
        return faults + fault_of("--bits", self.bits, AFFINE_BITS)

    def nbytes(self, shape: Shape, scale_itemsize: int) -> int:
        count = math.prod(shape)
        scales = 2 * scale_itemsize if self.mode == "affine" else 1  # others have 8-bit scales
        return count * self.bits // 8 + scales * (count // self.group_size)

    def outline(self, name: str, w: mx.array) -> Tensors:
        return _native_names(name, self._quantize(mx.zeros(w.shape, w.dtype)))

    def quantize(self, name: str, w: mx.array) -> Tensors:
        return _native_names(name, by_slices(name, w, 1, self._quantize))

    def dequantize(self, tensors: Tensors, dtype: mx.Dtype) -> mx.array:
        """8-bit scales stay as they are."""
        codes, *scales = tensors.values()
        if self.mode == "affine":
            scales = [scale.astype(dtype) for scale in scales]
        return self._dequantize(codes, *scales).astype(dtype)

    def rounded(self, w: mx.array) -> mx.array:
        return self._dequantize(*self._quantize(w)).astype(w.dtype)

    def _quantize(self, w: mx.array) -> tuple[mx.array, ...]:
        return tuple(mx.quantize(w, self.group_size, self.bits, self.mode))

    def _dequantize(self, *arrays: mx.array) -> mx.array:
        return mx.dequantize(*arrays, group_size=self.group_size, bits=self.bits, mode=self.mode)


@dataclass(frozen=True)
class MXFP4Format(MLXFormat):
    """4-bit floats (E2M1); 32 share a power of two (E8M0): OCP Microscaling Formats 1.0."""

    mode: str = field(default="mxfp4", init=False)
    bits: int = field(default=4, init=False)
    group_size: int = field(default=32, init=False)


@dataclass(frozen=True)
class NVFP4Format(MLXFormat):
    """4-bit floats (E2M1) in groups of 16, whose scale is an 8-bit float (E4M3)."""

    mode: str = field(default="nvfp4", init=False)
    bits: int = field(default=4, init=False)
    group_size: int = field(default=16, init=False)


class CustomFormat(WeightFormat):
    """A format that MLX lacks; by default its arrays have a row for each row of the weight."""

    native = False

    @abstractmethod
    def arrays(self, w: mx.array) -> Tensors:
        """Return the arrays that store a weight [O, D], lazily: ``weight``, and its parts."""

    @classmethod
    @abstractmethod
    def of_arrays(cls, arrays: Mapping[str, mx.array]) -> "CustomFormat":
        """Return the format of arrays of a checkpoint, which have the names of `arrays`."""

    @abstractmethod
    def module_of(
        self, dense: nn.Module, arrays: Mapping[str, mx.array], dtype: mx.Dtype
    ) -> nn.Module:
        """Return the `CustomWeight` with ``arrays`` in the place of a dense linear or embedding.

        ``dtype`` is of its dense weight. A ValueError says what does not fit.
        """

    def outline(self, name: str, w: mx.array) -> Tensors:
        arrays = self.arrays(mx.zeros(w.shape, w.dtype))
        return {part_name(name, part): mx.zeros(a.shape, a.dtype) for part, a in arrays.items()}

    def quantize(self, name: str, w: mx.array) -> Tensors:
        arrays = by_slices(name, w, 1, lambda rows: tuple(self.arrays(rows).values()))
        return dict(zip(self.outline(name, w), arrays, strict=True))

    def rounded(self, w: mx.array) -> mx.array:
        return self.dequantize(self.arrays(w), w.dtype)

    def is_stored(self, quantization: Mapping) -> bool:
        return quantization.get("mode") == self.mode


def part_name(name: str, part: str) -> str:
    """``name`` ends with ``.weight``."""
    return f"{name.removesuffix('.weight')}.{part}"


def fault_of(flag: str, value: int, valid: tuple[int, ...]) -> list[str]:
    if value in valid:
        return []
    return [f"{flag}: must be one of {valid} but is {value}."]


def format_class(mode: str) -> type[WeightFormat]:
    """Imports the module of the class."""
    return pkgutil.resolve_name(WEIGHT_MODES[mode].code)


def named_format(name: str, double_quant: bool = True) -> WeightFormat:
    if name not in WEIGHT_FORMATS:
        raise PackError(
            f"--quantize {name}: is not a format. {did_you_mean(name, list(WEIGHT_FORMATS))}",
            "unknown",
        )

    mode, settings = WEIGHT_FORMATS[name]
    kind = format_class(mode)
    if "double_quant" in _settings_of(kind):
        return kind(**settings, double_quant=double_quant)
    return kind(**settings)


def specified_format(mode: str, **settings: int | bool | None) -> WeightFormat:
    """None stands for the default of the format."""
    kind = format_class(mode)
    specified = {name: value for name, value in settings.items() if value is not None}
    valid = _settings_of(kind)
    if misplaced := [name for name in specified if name not in valid]:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in misplaced)
        raise PackError(f"{flags}: not with --mode {mode}.", "conflict")
    return kind(**specified)


def _settings_of(kind: type[WeightFormat]) -> list[str]:
    return [field.name for field in fields(kind) if field.init]


def format_name(quantization: Mapping | None) -> str:
    """The name of the format that a config's quantization is in, or ``none``."""
    q = quantization or {}
    mode = q.get("mode", "affine")
    sizes = (q.get("bits"), q.get("group_size"))
    for name, (of_name, _) in WEIGHT_FORMATS.items():
        if of_name != mode:
            continue
        weight_format = named_format(name)
        if sizes == (weight_format.bits, weight_format.group_size):
            return name
    return "none"


def format_of(module: nn.Module) -> WeightFormat | None:
    """The format of a module's weight; None if it is dense."""
    if "scales" not in module and not isinstance(module, CustomWeight):
        return None

    mode = getattr(module, "mode", "affine")
    if module.get("global_scale") is not None and not isinstance(module, CustomWeight):
        mode = "nvfp4 with global scales"  # of experts, which mlx-lm alone writes
    if mode not in WEIGHT_MODES:
        return MLXFormat(mode, module.bits, module.group_size)

    kind = format_class(mode)
    settings = {name: getattr(module, name) for name in _settings_of(kind) if name != "mode"}
    return kind(**settings)


def check_finite(name: str, w: mx.array) -> None:
    """Check that no exponent has all of its bits set."""
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


def by_slices(
    name: str, w: mx.array, multiple: int, quantize: Callable[[mx.array], tuple[mx.array, ...]]
) -> list[mx.array]:
    """The result of ``quantize`` for all rows, in slices of a multiple of ``multiple`` rows.

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
