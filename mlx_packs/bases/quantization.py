"""Which modules are packed and how, and one dense weight to the tensors that stand for it on disk.

`packing_of` is the rule for `packs quantize`, for quantizing while loading and for `packs plan`.
The names of tensors are those that `packs quantize` writes and `load_base` reads.
"""

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import mlx.nn as nn

from ..errors import PackError, did_you_mean
from ..ops import nf4
from ..ops.nf4 import BLOCK_SIZES, NESTED_BLOCK_SIZE, NF4Weight
from ..runtime import mx
from .bitsandbytes import to_bitsandbytes

AFFINE_BITS = (2, 3, 4, 5, 6, 8)
AFFINE_GROUP_SIZES = (32, 64, 128)
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

    @property
    def divisor(self) -> int:
        """What must divide the width of a weight; blocks of nf4 may go across rows."""
        return 2 if self.mode == "nf4" else self.group_size

    def fits(self, width: int) -> bool:
        """Whether rows of this width can be packed so."""
        return width % self.divisor == 0

    def to_config(self) -> dict:
        """As config.json spells it."""
        spelled = {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}
        return spelled | ({"double_quant": self.double_quant} if self.mode == "nf4" else {})


def packing_named(quantize: str, double_quant: bool = True) -> Packing:
    """What --quantize means: ``nf4``, ``affine4`` or ``affine8``, in groups of 64."""
    known = {"nf4": Packing(double_quant=double_quant)}
    known |= {f"affine{bits}": Packing("affine", bits) for bits in (4, 8)}
    if quantize not in known:
        hint = did_you_mean(quantize, list(known))
        raise PackError(f"--quantize {quantize}: no such way to quantize. {hint}")
    return known[quantize]


@dataclass(frozen=True)
class Recipe:
    """What is asked.

    keep: modules left dense: leaf (lm_head), tail or path.   bits_for: (regular expression, bits);
    paths that it finds become affine with so many bits, in groups of 64 under nf4.
    format: ``mlx``, or ``bitsandbytes`` for transformers.   max_shard_gb: in 10^9 bytes; no more
    than one shard is lost by an interruption.
    """

    packing: Packing = Packing()
    keep: tuple[str, ...] = ()
    bits_for: tuple[tuple[str, int], ...] = ()
    format: str = "mlx"
    max_shard_gb: float = 1.0

    def check(self) -> None:
        """Raises: PackError with all faults, in the words of the command line."""
        how, faults = self.packing, []
        if how.mode == "nf4" and how.group_size not in BLOCK_SIZES:
            faults.append(
                f"--group-size or --block must be one of {BLOCK_SIZES} but is {how.group_size}"
            )
        if how.mode == "affine" and how.group_size not in AFFINE_GROUP_SIZES:
            faults.append(
                f"--group-size must be one of {AFFINE_GROUP_SIZES} but is {how.group_size}"
            )
        if how.mode == "affine" and how.bits not in AFFINE_BITS:
            faults.append(f"--bits must be one of {AFFINE_BITS} but is {how.bits}")
        for expression, bits in self.bits_for:
            if bits not in AFFINE_BITS:
                faults.append(f"--bits-for must give one of {AFFINE_BITS} but gives {bits}")
            try:
                re.compile(expression)
            except re.error as error:
                faults.append(f"--bits-for '{expression}' is no regular expression ({error})")
        if self.format == "bitsandbytes" and (how.mode != "nf4" or self.bits_for):
            faults.append("--format bitsandbytes takes --mode nf4 only, and no --bits-for")
        if not self.max_shard_gb > 0:
            faults.append(f"--max-shard-gb must be positive but is {self.max_shard_gb}")
        if faults:
            raise PackError("; ".join(faults) + ".")


def is_named(path: str, name: str) -> bool:
    """Whether a module at ``path`` is called so: by its whole path or the end of it."""
    return path == name or path.endswith("." + name)


def check_names(recipe: Recipe, paths: Collection[str]) -> None:
    """Raises: PackError if the recipe names a module that is not among these."""
    leaves = sorted({path.rpartition(".")[2] for path in paths})
    for name in recipe.keep:
        # a tied head has no module of its own: its table is the embedding
        if name != "lm_head" and not any(is_named(path, name) for path in paths):
            raise PackError(f"--keep {name}: no such module. {did_you_mean(name, leaves)}")
    for expression, _ in recipe.bits_for:
        if not any(re.search(expression, path) for path in paths):
            raise PackError(
                f"--bits-for {expression}: finds no module; there are {', '.join(leaves)}."
            )


def packing_of(
    path: str,
    shape: tuple[int, ...],
    recipe: Recipe,
    kind: str = "linear",
    advice: bool | Mapping = True,
) -> Packing | None:
    """How the weight of one module is packed; None if it is left dense.

    Args:
        shape: [O, D] of its weight.   kind: ``linear``, ``embedding``, or ``other`` for what else
            can be quantized, such as stacked experts [E, O, D]; these are never NF4.
        advice: of the model's family (mlx-lm's ``quant_predicate``): False for dense, or bits and
            group_size. What the recipe says of the module by name goes before it.
    Raises: PackError if ``bits_for`` finds a module whose width does not fit.
    """
    how = _packing_or_reason(path, shape, recipe, kind, advice)
    return how if isinstance(how, Packing) else None


def _packing_or_reason(
    path: str, shape: tuple[int, ...], recipe: Recipe, kind: str, advice: bool | Mapping
) -> Packing | str:
    """How a weight is packed, or why it is left dense."""
    how, width = recipe.packing, shape[-1]
    if any(is_named(path, name) for name in recipe.keep):
        return "kept by name"
    if recipe.format == "bitsandbytes":
        # transformers packs linears alone, and leaves the head dense
        if kind != "linear" or is_named(path, "lm_head"):
            return "bitsandbytes packs neither embeddings nor heads nor experts"
    else:
        for expression, bits in recipe.bits_for:
            if re.search(expression, path):
                group_size = how.group_size if how.mode == "affine" else 64
                if width % group_size:
                    raise PackError(
                        f"--bits-for {expression}: {path} has {width} columns, which "
                        f"{group_size} does not divide; --keep it dense."
                    )
                return Packing("affine", bits, group_size)
        if not advice:
            return "its family advises so"
        if isinstance(advice, Mapping):
            how = Packing("affine", advice.get("bits", 4), advice.get("group_size", 64))
        if kind == "other" and how.mode != "affine":
            return "NF4 is for linears and embeddings"
    if not how.fits(width):
        return f"width {width} is no multiple of {how.divisor}"
    return how


def packings_of(model: nn.Module, recipe: Recipe) -> tuple[dict[str, Packing], dict[str, str]]:
    """How each module of a dense model is packed, and why the others are left dense; by path.

    Raises: PackError if the recipe names a module that is not there.
    """
    advise = getattr(model, "quant_predicate", None) or (lambda *_: True)
    modules = {
        path: module
        for path, module in reversed(model.named_modules())
        if hasattr(module, "to_quantized") and "weight" in module
    }
    check_names(recipe, modules)
    packed, dense = {}, {}
    for path, module in modules.items():
        shape, kind, advice = module.weight.shape, _kind(module), advise(path, module)
        how = _packing_or_reason(path, shape, recipe, kind, advice)
        (packed if isinstance(how, Packing) else dense)[path] = how
    return packed, dense


def _kind(module: nn.Module) -> str:
    if isinstance(module, nn.Linear):
        return "linear"
    return "embedding" if isinstance(module, nn.Embedding) else "other"


def packed_nbytes(shape: tuple[int, ...], how: Packing, scale_itemsize: int) -> int:
    """Bytes of a weight of this shape once it is packed: of all arrays that `outline` gives.

    Args:
        scale_itemsize: of a scale and of a bias of affine groups, which have the weights' dtype.
    """
    count = math.prod(shape)
    if how.mode == "affine":
        return count * how.bits // 8 + 2 * scale_itemsize * (count // how.group_size)
    blocks = -(-count // how.group_size)
    if not how.double_quant:
        return count // 2 + 4 * blocks
    return count // 2 + blocks + 4 * -(-blocks // NESTED_BLOCK_SIZE) + 4


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
        packed = NF4Weight(
            *_by_slices(name, w, rows_of_whole_blocks, pack), block_size=how.group_size
        )
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
