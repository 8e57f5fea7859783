"""Frozen weights in 4-bit NormalFloat, as bitsandbytes stores them.

Every weight is one of 16 levels, the quantiles of a normal distribution, times the largest
magnitude of its block (absmax). Double quantization stores the absmax in 8 bits too. The reference
comes first; below it the kernels of kernels/nf4, whose README has the plan.

QLoRA: https://arxiv.org/abs/2305.14314
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..runtime import dtype_name, mx
from ._backend import THREADS, Kernel, choose, table, tiles
from ._check import Check, Instance, normal, sparse_signs
from ._cost import Launch, casts, product
from .blockwise import count_below, dynamic_map, nearest
from .matmul import sliced_matmul

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

    The result is bit-identical to that of bitsandbytes on an x86-64 CPU with one thread; with more
    threads only its sum behind ``offset`` differs, from 32768 blocks on.
    """
    outputs, depth = w.shape
    if depth % 2:
        raise ValueError(f"[nf4] columns of a weight must be even but got {depth}.")
    scaled, absmax = _normalized(w.astype(mx.float32).flatten(), block_size)
    levels = _levels()
    middles = (levels[1:] + levels[:-1]) / 2
    # 15 comparisons of all values are 10 times faster than a bisection, which gathers
    above = [(scaled > middle).view(mx.uint8) for middle in middles]
    codes = functools.reduce(mx.add, above).reshape(outputs, depth // 2, 2)
    weight = (codes[..., 0] << 4) | codes[..., 1]
    quantized = NF4Weight(weight, absmax, block_size=block_size)
    return quantize_absmax(quantized) if double_quant else quantized


def quantize_absmax(quantized: NF4Weight) -> NF4Weight:
    """Return a weight with float32 absmax as one with codes of them, the second quantization."""
    blocks = quantized.absmax.size
    offset = _sum(quantized.absmax)[None] / blocks
    centred = mx.pad(quantized.absmax - offset, (0, -blocks % NESTED_BLOCK_SIZE))
    centred = centred.reshape(-1, NESTED_BLOCK_SIZE)
    nested_absmax = mx.abs(centred).max(axis=1)
    codes = count_below(centred * (1 / nested_absmax)[:, None], _absmax_edges())  # of 0 / 0 it is 0
    codes = codes.flatten()[:blocks]
    return NF4Weight(quantized.weight, codes, nested_absmax, offset, quantized.block_size)


def dequantize(weight: NF4Weight, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
    """Return the weight as [O, D].

    Semantics: w.flatten()[i] = LEVELS[code[i]] * absmax[i // block_size]
    The product is float32, rounded to ``dtype`` once.
    """
    return _dequantized(_dequantize_backend(weight, dtype), weight, dtype)


def matmul(x: mx.array, weight: NF4Weight) -> mx.array:
    """Return the product with a quantized weight, which is frozen: the gradient reaches x only.

    Semantics: y = x @ dequantize(weight, x.dtype).T
    No dense weight is stored for the backward pass. For few rows the 4-bit weight is read as it is, and
    not rounded to the dtype of x.

    Args:
        x: [..., D], any float dtype; products accumulate in float32. The result [..., O] has it.
        weight: [O, D].
    """
    depth = weight.shape[1]
    if x.shape[-1] != depth:
        raise ValueError(f"[nf4] x must have {depth} columns but its shape is {x.shape}.")
    return _product(x, weight, _matvec_backend(x, weight), dequantize)


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
    depth, size = weight.shape[1], weight.block_size
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
    scaled, absmax = [], []
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
def _levels() -> mx.array:
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
    half, last = np.float32(0.5), np.float32(65535)

    def place(value: np.ndarray) -> np.ndarray:
        return ((value + np.float32(1)) * half * last + half).astype(np.int32)

    places = np.arange(65536, dtype=np.float32) * np.float32(2) / last - np.float32(1)
    codes = np.searchsorted((values[1:] + values[:-1]) * half, places)
    wanted = np.searchsorted(codes, np.arange(255), side="right") - 1  # the last place of a code
    below, above = np.full(255, -1, np.float32), np.full(255, 1, np.float32)
    for _ in range(64):
        middle = (below + above) * half
        fits = place(middle) <= wanted
        below, above = np.where(fits, middle, below), np.where(fits, above, middle)
    return mx.array(below)


LANES = 32  # of a simdgroup, of a warp
# As MLX's own quantized matrix-vector product: small groups, so that 1024 outputs fill all cores,
# and 4 outputs a simdgroup, so that x is loaded once for 4.
MATVEC_THREADS, MATVEC_OUTPUTS = 64, 4
ROW_TILES = (1, 2, 4, 8)  # rows that share an unpacked word
MATVEC_ROWS = 16  # at 24 a dense weight and MLX's product cost the same, by the cost model of Macs
UNPACK_FLOPS = 6  # shift, mask, look up; each costs as much as a multiply-add


def _row_tile(rows: int) -> int:
    return next((tile for tile in ROW_TILES if rows <= tile), ROW_TILES[-1])


def _word_dtype(depth: int) -> mx.Dtype:
    """Return the word that codes are read by: 8 codes where rows begin at a word, else 2."""
    return mx.uint32 if depth % 8 == 0 else mx.uint8


_INPUTS = ("weight", "absmax", "map", "nested", "offset", "levels", "sizes")
_ARGUMENTS = "weight, absmax, map, nested, offset, levels, sizes"


_DEQUANTIZE = Kernel(  # one word of codes a thread
    OP,
    "nf4_dequantize",
    _INPUTS,
    ("w",),
    "{shared} float table[LEVELS];\n"
    f"dequantize<T, W, A, BLOCK>({_ARGUMENTS}, w, table,"
    f" {{group}}.x * {THREADS} + {{thread}}, {{thread}});",
)
_MATVEC = Kernel(
    OP,
    "nf4_matvec",
    ("x", *_INPUTS),
    ("y",),
    "{shared} float table[LEVELS];\n"
    f"matvec<T, W, A, BLOCK, ROWS, {MATVEC_OUTPUTS}, {MATVEC_THREADS}>"
    f"(x, {_ARGUMENTS}, y, table, {{group}}, {{thread}});",
    MATVEC_THREADS,
)


def _product(
    x: mx.array,
    weight: NF4Weight,
    matvec_by: str,
    unpack: Callable[[NF4Weight, mx.Dtype], mx.array],
) -> mx.array:
    rows = functools.partial(_dense_rows, unpack, weight)
    matvec = functools.partial(_matvec, matvec_by, weight)
    return sliced_matmul(x, weight.shape, rows, None if matvec_by == "reference" else matvec)


def _dequantized(backend: str, weight: NF4Weight, dtype: mx.Dtype) -> mx.array:
    if backend == "reference":
        return reference_dequantize(weight, dtype)
    inputs, template = _kernel_inputs(weight, dtype)
    words = inputs[0].size
    (w,) = _DEQUANTIZE.launch(
        backend,
        [*inputs, table((words,))],
        template,
        (tiles(words, THREADS), 1, 1),
        [(weight.shape, dtype)],
    )
    return w


def _matvec(backend: str, weight: NF4Weight, x: mx.array) -> mx.array:
    rows, (outputs, depth) = x.shape[0], weight.shape
    inputs, template = _kernel_inputs(weight, x.dtype)
    tile = _row_tile(rows)
    outputs_of_group = MATVEC_OUTPUTS * MATVEC_THREADS // LANES
    (y,) = _MATVEC.launch(
        backend,
        [x, *inputs, table((rows, depth, outputs))],
        {**template, "ROWS": tile},
        (tiles(outputs, outputs_of_group), tiles(rows, tile), 1),
        [((rows, outputs), x.dtype)],
    )
    return y


def _kernel_inputs(weight: NF4Weight, dtype: mx.Dtype) -> tuple[list[mx.array], dict]:
    """Return the inputs of both kernels but the sizes, and their template arguments."""
    word = _word_dtype(weight.shape[1])
    nested, offset = dynamic_map(), dynamic_map()  # without double quantization they are not read
    if weight.double_quant:
        nested, offset = weight.nested_absmax, weight.offset
    inputs = [weight.weight.flatten().view(word), weight.absmax, dynamic_map(), nested, offset]
    template = {"T": dtype, "W": word, "A": weight.absmax.dtype, "BLOCK": weight.block_size}
    return [*inputs, _levels()], template


class Compiled(NamedTuple):
    """The parameters for which one program is compiled."""

    kernel: str
    dtype: mx.Dtype
    word: mx.Dtype
    block: int
    double_quant: bool
    row_tile: int = 0


class Sizes(NamedTuple):
    """The sizes on which the cost depends besides the rows."""

    weight: tuple[int, int]


def _dequantize_backend(weight: NF4Weight, dtype: mx.Dtype) -> str:
    if weight.weight.size == 0:
        return "reference"
    form = weight.block_size, weight.double_quant
    instance = Compiled("dequantize", dtype, _word_dtype(weight.shape[1]), *form)
    return choose(
        OP,
        instance,
        weight.shape[0],
        Sizes(weight.shape),
        lambda backend: checks(backend, *instance[1:5], rows=MATVEC_ROWS + 1),
        lambda: dequantize_plans(dtype.size, weight.shape, *form),
    )


def _matvec_backend(x: mx.array, weight: NF4Weight) -> str:
    if x.size == 0 or weight.weight.size == 0:
        return "reference"
    rows = x.size // x.shape[-1]
    if rows > MATVEC_ROWS:
        return "reference"
    tile = _row_tile(rows)
    rows_of_check = tile + 3 if tile == ROW_TILES[-1] else tile  # a second tile, with a tail
    form = weight.block_size, weight.double_quant
    instance = Compiled("matvec", x.dtype, _word_dtype(weight.shape[1]), *form, tile)
    return choose(
        OP,
        instance,
        rows,
        Sizes(weight.shape),
        lambda backend: checks(backend, *instance[1:5], rows=rows_of_check),
        lambda: matvec_plans(x.dtype.size, rows, weight.shape, *form),
    )


def checks(
    backend: str, dtype: mx.Dtype, word: mx.Dtype, block_size: int, double_quant: bool, rows: int
) -> list[Check]:
    """Return small inputs with tails in all directions and blocks across rows."""
    depth = 264 + (0 if word == mx.uint32 else 2)
    outputs = tiles((NESTED_BLOCK_SIZE + 1) * block_size, depth) | 1  # two nested blocks, a tail
    shape = (dtype, rows, depth, outputs, block_size, double_quant)
    return [check_of(backend, *shape, exact) for exact in (True, False)]


def check_of(
    backend: str,
    dtype: mx.Dtype,
    rows: int,
    depth: int,
    outputs: int,
    block_size: int,
    double_quant: bool,
    exact: bool,
) -> Check:
    """Return a seeded weight of these sizes and rows of x; exact ones have levels -1, 0 and 1."""
    drawn = _drawn_weight(outputs, depth, block_size, double_quant, exact)
    matvec_by = backend if rows <= MATVEC_ROWS else "reference"

    def by_kernel(x: mx.array) -> list[mx.array]:
        return [_product(x, drawn, matvec_by, functools.partial(_dequantized, backend))]

    def by_reference(x: mx.array) -> list[mx.array]:
        return [x @ reference_dequantize(drawn, x.dtype).T]

    x = (sparse_signs if exact else normal)((rows, depth), 0).astype(dtype)
    name = f"{'exact' if exact else 'random'} {rows} x {depth} to {outputs}"
    return Check(name, by_kernel, by_reference, [x], exact)


def _drawn_weight(
    outputs: int, depth: int, block_size: int, double_quant: bool, exact: bool
) -> NF4Weight:
    if not exact:
        return quantize(normal((outputs, depth), 1), block_size, double_quant)
    signs = sparse_signs((outputs, depth), 1)
    quantized = quantize(signs, block_size, double_quant=False)
    blocks = quantized.absmax.size
    powers = 2.0 ** (mx.arange(blocks) % 3)
    if not double_quant:
        return NF4Weight(quantized.weight, powers, block_size=block_size)
    values = mx.arange(blocks) % 2  # of the map: 0 or 1
    codes = nearest(values.astype(mx.float32), dynamic_map())
    nested = 2.0 ** (mx.arange(tiles(blocks, NESTED_BLOCK_SIZE)) % 3)
    return NF4Weight(quantized.weight, codes, nested, mx.array([2.0]), block_size)


def instances() -> list[Instance]:
    """Return instances of the q projection of Qwen3-4B, 2560 to 4096: one row, and 512."""
    return [
        instance_of(dtype, rows, (4096, 2560), 64, double_quant)
        for dtype in (mx.float32, mx.bfloat16, mx.float16)
        for double_quant in (False, True)
        for rows in (1, 512)
    ]


def instance_of(
    dtype: mx.Dtype, rows: int, shape: tuple[int, int], block_size: int, double_quant: bool
) -> Instance:
    """Return the instance of a product with a weight [O, D]: by `matvec`, or dequantized."""
    outputs, depth = shape
    form = (dtype, _word_dtype(depth), block_size, double_quant)
    many = rows > MATVEC_ROWS
    compiled = Compiled("dequantize", *form)
    if not many:
        compiled = Compiled("matvec", *form, _row_tile(rows))
    kind = "nf4 double" if double_quant else "nf4"
    sizes = (rows, depth, outputs, block_size, double_quant)
    return Instance(
        OP,
        f"{dtype_name(dtype)} {kind} {depth} to {outputs} rows {rows}",
        (compiled, outputs if many else rows, Sizes(shape)),
        lambda backend: checks(backend, *form, min(rows, MATVEC_ROWS + 1)),
        lambda backend: check_of(backend, dtype, *sizes, exact=False),
        trains=many,
    )


def dequantize_plans(
    itemsize: int, shape: tuple[int, int], block_size: int, double_quant: bool
) -> tuple[list[Launch], list[Launch]]:
    """Return launches that dequantize the weight: of plain MLX, and the kernel."""
    n = shape[0] * shape[1]
    blocks = tiles(n, block_size)
    plain = []
    if double_quant:
        plain += [
            Launch("look up absmax", 5 * blocks),
            Launch("times nested absmax", 8 * blocks),
            Launch("add offset", 8 * blocks),
        ]
    plain += [Launch("look up levels", 4.5 * n), Launch("times absmax", 8 * n + 4 * blocks)]
    plain += casts("cast", itemsize, [n])
    stored = _quantized_bytes(n, block_size, double_quant)
    return plain, [Launch("dequantize", stored + itemsize * n, (UNPACK_FLOPS + 2) * n)]


def matvec_plans(
    itemsize: int, rows: int, shape: tuple[int, int], block_size: int, double_quant: bool
) -> tuple[list[Launch], list[Launch]]:
    """Return launches of a product with few rows: by a dense weight, and by the matvec kernel."""
    outputs, depth = shape
    n = outputs * depth
    dense = dequantize_plans(itemsize, shape, block_size, double_quant)[1]
    dense += [product("MLX's product", itemsize, rows, depth, outputs)]
    row_tiles, tile = tiles(rows, _row_tile(rows)), _row_tile(rows)
    stored = _quantized_bytes(n, block_size, double_quant)
    x = itemsize * rows * depth
    flops = row_tiles * (UNPACK_FLOPS + 2 * tile) * n
    again = row_tiles * stored + tiles(outputs, MATVEC_OUTPUTS) * x
    return dense, [Launch("matvec", stored + x + itemsize * rows * outputs, flops, again)]


def _quantized_bytes(n: int, block_size: int, double_quant: bool) -> float:
    blocks = tiles(n, block_size)
    absmax = blocks + 4 * tiles(blocks, NESTED_BLOCK_SIZE) if double_quant else 4 * blocks
    return n / 2 + absmax
