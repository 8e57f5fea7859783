"""Frozen weights in 4-bit NormalFloat, as bitsandbytes stores them.

Every weight is one of 16 levels, the quantiles of a normal distribution, times the largest
magnitude of its block (absmax). Double quantization stores the absmax in 8 bits too. This is the
reference; nf4_kernel.py launches the kernels of kernels/nf4.

QLoRA: https://arxiv.org/abs/2305.14314
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..runtime import dtype_name, mx
from . import dispatch
from .blockwise import count_below, dynamic_map
from .matmul import sliced_matmul
from .profile import tiles

OP = "nf4"
BLOCK_SIZES = (32, 64, 128, 256)
NESTED_BLOCK_SIZE = 256  # absmax codes that share a nested absmax
_TINY = 1e-38  # that an absmax is at least, where it divides
_LANES = 8  # of torch's vectors
LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


@dataclass(frozen=True, eq=False)
class NF4Weight:
    """A quantized weight [O, D]. Blocks are consecutive elements of the flattened weight.

    Attributes:
        weight: uint8 [O, D / 2]; of two neighbours the first is in the high half of the byte.
        absmax: float32 [blocks], or with double quantization uint8, codes of `dynamic_map`.
        nested_absmax: float32 [blocks / 256, rounded up], of the codes.
        offset: float32 [1]; an absmax is dynamic_map[code] * nested_absmax[block // 256] + offset.
        block_size: Weights of a block.
    """

    weight: mx.array
    absmax: mx.array
    nested_absmax: mx.array | None = None
    offset: mx.array | None = None
    block_size: int = 64

    def __post_init__(self) -> None:
        if self.block_size not in BLOCK_SIZES:
            raise ValueError(
                f"[NF4Weight] 'block_size' must be one of {BLOCK_SIZES} but got {self.block_size}."
            )

        blocks = tiles(2 * self.weight.size, self.block_size)
        wanted = {"absmax": f"float32 [{blocks}]"}
        if self.double_quant:
            nested = tiles(blocks, NESTED_BLOCK_SIZE)
            wanted = {"absmax": f"uint8 [{blocks}]", "nested_absmax": f"float32 [{nested}]"}
            wanted["offset"] = "float32 [1]"

        faults = [
            f"'{name}' must be {must} but got {has}"
            for name, must in wanted.items()
            if (has := _kind(getattr(self, name))) != must
        ]
        if self.weight.ndim != 2 or self.weight.dtype != mx.uint8:
            faults.insert(0, f"'weight' must be uint8 [O, D / 2] but got {_kind(self.weight)}")

        if faults:
            raise ValueError(f"[NF4Weight] {'; '.join(faults)}.")

    @property
    def shape(self) -> tuple[int, int]:
        """[O, D] of the weight that is quantized."""
        return self.weight.shape[0], 2 * self.weight.shape[1]

    def tensors(self, path: str) -> dict[str, mx.array]:
        """Return its arrays, by the names that they have in the files of a module at ``path``."""
        parts = ("weight", "absmax", "nested_absmax", "offset")
        arrays = {f"{path}.{part}": getattr(self, part) for part in parts}
        return {name: array for name, array in arrays.items() if array is not None}

    @property
    def double_quant(self) -> bool:
        """Whether the absmax are codes themselves."""
        return self.nested_absmax is not None or self.offset is not None

    @property
    def nbytes(self) -> int:
        """Bytes that are stored."""
        parts = (self.weight, self.absmax, self.nested_absmax, self.offset)
        return sum(part.nbytes for part in parts if part is not None)


def _kind(value: mx.array | None) -> str:
    if value is None:
        return "None"
    return f"{dtype_name(value.dtype)} {list(value.shape)}"


def quantize(w: mx.array, block_size: int = 64, double_quant: bool = True) -> NF4Weight:
    """Quantize a weight [O, D] of any float dtype; D must be even.

    The result is bit-identical to bitsandbytes' on an x86-64 CPU with one thread; with more
    threads only its sum behind ``offset`` differs, from 32768 blocks on.
    """
    outputs, depth = w.shape
    if depth % 2:
        raise ValueError(f"[nf4] columns of a weight must be even but got {depth}.")

    scaled, absmax = _normalized(w.astype(mx.float32).flatten(), block_size)
    levels = level_table()
    middles = (levels[1:] + levels[:-1]) / 2
    # 15 comparisons of all values are 10 times faster than a bisection, which gathers
    above = [(scaled > middle).view(mx.uint8) for middle in middles]
    codes = functools.reduce(mx.add, above).reshape(outputs, depth // 2, 2)
    weight = (codes[..., 0] << 4) | codes[..., 1]

    quantized = NF4Weight(weight, absmax, block_size=block_size)
    if double_quant:
        quantized = quantize_absmax(quantized)
    return quantized


def quantize_absmax(quantized: NF4Weight) -> NF4Weight:
    """Return a weight with float32 absmax as one with codes of them, the second quantization."""
    blocks = quantized.absmax.size
    offset = _sum(quantized.absmax)[None] / blocks

    centred = mx.pad(quantized.absmax - offset, (0, -blocks % NESTED_BLOCK_SIZE))
    centred = centred.reshape(-1, NESTED_BLOCK_SIZE)
    nested_absmax = mx.abs(centred).max(axis=1)
    # the code of 0 / 0 is 0
    codes = count_below(centred * (1 / nested_absmax)[:, None], _absmax_edges())
    codes = codes.flatten()[:blocks]

    return NF4Weight(quantized.weight, codes, nested_absmax, offset, quantized.block_size)


def dequantize(weight: NF4Weight, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
    """Return the weight as [O, D].

    Semantics: w.flatten()[i] = LEVELS[code[i]] * absmax[i // block_size]
    The product is float32, rounded to ``dtype`` once.
    """
    compute = reference_dequantize
    if (kernels := dispatch.kernels(OP)) is not None:
        compute = kernels.compute_dequantize
    return compute(weight, dtype)


def matmul(x: mx.array, weight: NF4Weight) -> mx.array:
    """Return the product with a quantized weight, which is frozen: the gradient reaches x only.

    Semantics: y = x @ dequantize(weight, x.dtype).T
    No dense weight is stored for the backward pass. For few rows the 4-bit weight is read as it is,
    and not rounded to the dtype of x.

    Args:
        x: [..., D], any float dtype; products accumulate in float32. The result [..., O] has it.
        weight: [O, D].
    """
    depth = weight.shape[1]
    if x.shape[-1] != depth:
        raise ValueError(f"[nf4] x must have {depth} columns but its shape is {x.shape}.")
    matvec = kernels.matvec_of(x, weight) if (kernels := dispatch.kernels(OP)) is not None else None
    return product(x, weight, matvec, dequantize)


def product(
    x: mx.array,
    weight: NF4Weight,
    matvec: Callable[[mx.array], mx.array] | None,
    unpack: Callable[[NF4Weight, mx.Dtype], mx.array],
) -> mx.array:
    """Return `matmul` by ``matvec``, or by the dense rows of ``unpack`` where that is None."""
    rows = functools.partial(_dense_rows, unpack, weight)
    return sliced_matmul(x, weight.shape, rows, matvec)


def rows(weight: NF4Weight, index: mx.array, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
    """Return rows [*index.shape, D] of the weight; only these are dequantized."""
    _, depth = weight.shape
    codes = _levels_of_byte()[weight.weight[index]].reshape(*index.shape, depth)

    if depth % weight.block_size == 0:
        blocks = depth // weight.block_size
        block = index[..., None] * blocks + mx.arange(blocks)
        dense = codes.reshape(*block.shape, -1) * _absmax(weight, block)[..., None]
        return dense.reshape(codes.shape).astype(dtype)

    block = (index[..., None] * depth + mx.arange(depth)) // weight.block_size
    return (codes * _absmax(weight, block)).astype(dtype)


def reference_dequantize(weight: NF4Weight, dtype: mx.Dtype) -> mx.array:
    """Return the dense weight by plain MLX."""
    absmax = weight.absmax
    if weight.double_quant:
        nested = _by_block(dynamic_map()[absmax], weight.nested_absmax, NESTED_BLOCK_SIZE)
        absmax = nested + weight.offset
    dense = _by_block(_levels_of_byte()[weight.weight].flatten(), absmax, weight.block_size)
    return dense.astype(dtype).reshape(weight.shape)


def _dense_rows(
    unpack: Callable[[NF4Weight, mx.Dtype], mx.array],
    weight: NF4Weight,
    start: int,
    stop: int,
    after: mx.array,
) -> mx.array:
    """Return rows [start, stop) of the weight, which begin with a block; not before ``after``."""
    if (start, stop) == (0, weight.shape[0]):
        return unpack(weight, after.dtype)

    depth = weight.shape[1]
    size = weight.block_size
    blocks = mx.arange(start * depth // size, tiles(stop * depth, size))
    arrays = mx.depends([weight.weight[start:stop], _absmax(weight, blocks)], after)
    return unpack(NF4Weight(*arrays, block_size=size), after.dtype)


def _absmax(weight: NF4Weight, block: mx.array) -> mx.array:
    """Return the absmax of these blocks, in float32."""
    if not weight.double_quant:
        return weight.absmax[block]
    nested = weight.nested_absmax[block // NESTED_BLOCK_SIZE]
    return dynamic_map()[weight.absmax[block]] * nested + weight.offset


def _by_block(values: mx.array, factors: mx.array, block_size: int) -> mx.array:
    """Return values[i] * factors[i // block_size]; the last block may be short."""
    if values.size % block_size == 0:
        return (values.reshape(-1, block_size) * factors[:, None]).flatten()
    return values * mx.repeat(factors, block_size)[: values.size]


def _normalized(values: mx.array, block_size: int) -> tuple[mx.array, mx.array]:
    """Return values over the largest magnitude of their block, and those magnitudes."""
    # as bitsandbytes has it: whole blocks times the reciprocal, a short last one divided
    whole = values.size // block_size * block_size
    scaled = []
    absmax = []

    if whole:
        blocks = values[:whole].reshape(-1, block_size)
        absmax.append(mx.abs(blocks).max(axis=1))
        scaled.append((blocks * (1 / mx.maximum(absmax[0], _TINY))[:, None]).flatten())
    if whole < values.size:
        short = values[whole:]
        absmax.append(mx.maximum(mx.abs(short).max(keepdims=True), _TINY))
        scaled.append(short / absmax[-1])

    return mx.concatenate(scaled), mx.concatenate(absmax)


def _sum(values: mx.array) -> mx.array:
    """Return the sum of a vector in the order of torch on a CPU, bit-identical on every device.

    Words of 8 lanes, of which 4 make a row. Rows are added up in steps of 2^p, the sums of steps
    likewise, four levels deep; then what each level has left over, the rest, the lanes.
    """
    lanes = _LANES if values.size >= _LANES else 1
    words = values[: values.size // lanes * lanes].reshape(-1, lanes)
    rows = words[: len(words) // 4 * 4].reshape(-1, 4, lanes)
    step = 2 ** max(4, (len(rows) - 1).bit_length() // 4)

    levels = []
    for _ in range(3):
        whole = len(rows) // step * step
        levels.append(_running(rows[whole:]))
        rows = _running(rows[:whole].reshape(-1, step, 4, lanes).swapaxes(0, 1))

    first, *others = _running(mx.stack([*levels, _running(rows)]))
    total = _running(mx.stack([first, *words[len(words) // 4 * 4 :], *others]))
    return _running(mx.concatenate([mx.zeros(1), values[words.size :], total]))


def _running(terms: mx.array) -> mx.array:
    """Return the sum over the first axis, one after another."""
    if len(terms) == 0:
        return mx.zeros(terms.shape[1:])
    return functools.reduce(mx.add, list(terms))


@functools.cache
def level_table() -> mx.array:
    """Return the 16 levels, float32 [16]."""
    return mx.array(LEVELS, dtype=mx.float32)


@functools.cache
def _levels_of_byte() -> mx.array:
    """[256, 2]: one look-up for both codes of a byte."""
    return mx.array([[LEVELS[byte >> 4], LEVELS[byte & 15]] for byte in range(256)])


@functools.cache
def _absmax_edges() -> mx.array:
    """[255]: the largest value of each absmax code but the last.

    bitsandbytes rounds a value to one of 65536 in [-1, 1] and looks the nearest code of that up.
    """
    values = np.array(dynamic_map())
    half = np.float32(0.5)
    last = np.float32(65535)

    def place(value: np.ndarray) -> np.ndarray:
        return ((value + np.float32(1)) * half * last + half).astype(np.int32)

    places = np.arange(65536, dtype=np.float32) * np.float32(2) / last - np.float32(1)
    codes = np.searchsorted((values[1:] + values[:-1]) * half, places)
    wanted = np.searchsorted(codes, np.arange(255), side="right") - 1  # the last place of a code

    below = np.full(255, -1, np.float32)
    above = np.full(255, 1, np.float32)
    for _ in range(64):
        middle = (below + above) * half
        fits = place(middle) <= wanted
        below = np.where(fits, middle, below)
        above = np.where(fits, above, middle)

    return mx.array(below)
