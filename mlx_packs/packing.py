"""One dense weight to the tensors that stand for it on disk, with little memory beside the two.

The same names are written by `packs quantize`, read by `load_base` and made while loading.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from .bitsandbytes import to_bitsandbytes
from .errors import PackError
from .ops import nf4
from .ops.nf4 import NESTED_BLOCK_SIZE, NF4Weight
from .runtime import mx

_SLICE = 1 << 20  # weights that are packed at a time
_INFINITY = {  # as a word, without its sign; what lies above is NaN
    mx.float32: (mx.uint32, 0x7F800000),
    mx.bfloat16: (mx.uint16, 0x7F80),
    mx.float16: (mx.uint16, 0x7C00),
}


@dataclass(frozen=True)
class Packing:
    """How a weight is packed. mode: nf4 or affine.   group_size: of nf4 its block size."""

    mode: str = "nf4"
    bits: int = 4
    group_size: int = 64
    double_quant: bool = True

    def fits(self, width: int) -> bool:
        """Whether rows of this width can be packed so; blocks of nf4 may go across rows."""
        return width % (2 if self.mode == "nf4" else self.group_size) == 0

    def to_config(self) -> dict:
        """As config.json spells it."""
        spelled = {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}
        return spelled | ({"double_quant": self.double_quant} if self.mode == "nf4" else {})


def quantized_tensors(
    name: str, w: mx.array, how: Packing, format: str = "mlx"
) -> dict[str, mx.array]:
    """The tensors to which a weight called ``name`` (with its ``.weight``) is packed.

    Slices of rows are packed and evaluated one after another: beside the weight and the result,
    a few times a million weights are in memory.
    Args:
        w: [O, D], for affine also [E, O, D].
    Raises: PackError if a weight is NaN or infinite.
    """
    if how.mode == "nf4":

        def pack(rows: mx.array) -> tuple[mx.array, mx.array]:
            packed = nf4.quantize(rows, how.group_size, double_quant=False)
            return packed.weight, packed.absmax

        rows_of_whole_blocks = how.group_size // math.gcd(how.group_size, w.shape[-1])
        packed = NF4Weight(*_by_slices(name, w, rows_of_whole_blocks, pack),
                           block_size=how.group_size)  # fmt: skip
        if how.double_quant:
            packed = nf4.quantize_absmax(packed)
        return _nf4_names(name, packed, w.dtype, format)
    packed = _by_slices(name, w, 1, lambda rows: mx.quantize(rows, how.group_size, how.bits))
    return _affine_names(name, packed)


def outline(
    name: str, w: mx.array, how: Packing | None, format: str = "mlx"
) -> dict[str, mx.array]:
    """What `quantized_tensors` gives, as lazy zeros: names, shapes and dtypes; computes nothing."""
    if how is None:
        return {name: mx.zeros(w.shape, w.dtype)}
    if how.mode == "affine":
        return _affine_names(
            name, mx.quantize(mx.zeros(w.shape, w.dtype), how.group_size, how.bits)
        )
    codes = mx.zeros((w.shape[0], w.shape[1] // 2), mx.uint8)
    blocks = -(-w.size // how.group_size)
    absmax = [mx.zeros(blocks)]
    if how.double_quant:
        nested = mx.zeros(-(-blocks // NESTED_BLOCK_SIZE))
        absmax = [mx.zeros(blocks, mx.uint8), nested, mx.zeros(1)]
    packed = NF4Weight(codes, *absmax, block_size=how.group_size)
    return _nf4_names(name, packed, w.dtype, format)


def check_finite(name: str, w: mx.array) -> None:
    """Raises: PackError if a weight is NaN or infinite: all bits of its exponent are set."""
    if w.dtype not in _INFINITY:
        return
    word, infinity = _INFINITY[w.dtype]
    bits = w.flatten().view(word)
    for start in range(0, bits.size, _SLICE):
        magnitudes = bits[start : start + _SLICE] & (2 ** (8 * word.size - 1) - 1)
        if magnitudes.max().item() >= infinity:
            raise PackError(f"{name}: has NaN or infinite weights; such a model cannot be used.")


def _slices(w: mx.array, multiple: int) -> list[slice]:
    """Slices of all rows, each of a multiple of so many."""
    rows = max(1, _SLICE // (w.size // len(w)) // multiple) * multiple
    return [slice(start, min(start + rows, len(w))) for start in range(0, len(w), rows)]


def _by_slices(
    name: str, w: mx.array, multiple: int, pack: Callable[[mx.array], tuple[mx.array, ...]]
) -> list[mx.array]:
    """What ``pack`` makes of all rows, from slices of a multiple of so many rows.

    Slices are put in their place at once; to join them in the end would take the memory twice.
    Raises: PackError if a weight is NaN or infinite.
    """
    check_finite(name, w)
    whole = [mx.zeros(part.shape, part.dtype) for part in pack(w)]
    at = [0] * len(whole)
    for rows in _slices(w, multiple):
        for i, part in enumerate(pack(w[rows])):
            whole[i][at[i] : at[i] + len(part)] = part
            at[i] += len(part)
        mx.eval(whole)
    return whole


def _affine_names(name: str, packed: tuple[mx.array, ...] | list[mx.array]) -> dict[str, mx.array]:
    path = name.removesuffix(".weight")
    names = (name, f"{path}.scales", f"{path}.biases")
    return dict(zip(names, packed, strict=True))


def _nf4_names(name: str, packed: NF4Weight, dtype: mx.Dtype, format: str) -> dict[str, mx.array]:
    if format == "bitsandbytes":
        return to_bitsandbytes(name, packed, str(dtype).removeprefix("mlx.core."))
    path = name.removesuffix(".weight")
    named = {name: packed.weight, f"{path}.absmax": packed.absmax}
    if packed.double_quant:
        named |= {f"{path}.nested_absmax": packed.nested_absmax, f"{path}.offset": packed.offset}
    return named
