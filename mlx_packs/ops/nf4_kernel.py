"""The launches of kernels/nf4, checks against the reference, and what they cost."""

import functools
from collections.abc import Callable
from typing import NamedTuple

from ..runtime import dtype_name, mx
from ._backend import THREADS, Instance, Kernel, KernelSpec, table
from ._check import Check, normal, sparse_signs
from .blockwise import dynamic_map, nearest
from .nf4 import NESTED_BLOCK_SIZE, OP, NF4Weight, level_table, quantize, reference_dequantize
from .nf4 import product as nf4_product
from .profile import tiles

LANES = 32  # of a simdgroup, of a warp
# As MLX's own quantized matrix-vector product: small groups, so that 1024 outputs fill all cores,
# and 4 outputs a simdgroup, so that x is loaded once for 4.
MATVEC_THREADS = 64
MATVEC_OUTPUTS = 4
ROW_TILES = (1, 2, 4, 8)  # rows that share an unpacked word
MATVEC_ROWS = 16  # at 24 a dense weight and MLX's product cost the same, by the cost model of Macs
_MANY_ROWS = 512  # of the product for which a weight is dequantized and timed


def row_tile(rows: int) -> int:
    """Return the rows that share an unpacked word; more of them take several turns."""
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


class NF4Program(NamedTuple):
    """The parameters for which one program is compiled."""

    kernel: str
    dtype: mx.Dtype
    word: mx.Dtype
    block: int
    double_quant: bool
    row_tile: int = 0


class NF4Sizes(NamedTuple):
    """The sizes on which the cost depends besides the rows."""

    weight: tuple[int, int]


def compute_dequantize(weight: NF4Weight, dtype: mx.Dtype) -> mx.array:
    """Return `dequantize` by a kernel, or by the reference where that is faster."""
    instance = NF4Program("dequantize", dtype, *_form(weight))
    backend = "reference"
    if weight.weight.size:
        backend = SPEC.choose(instance, weight.shape[0], NF4Sizes(weight.shape))
    if backend == "reference":
        return reference_dequantize(weight, dtype)
    return _dequantized(backend, weight, dtype)


def matvec_of(x: mx.array, weight: NF4Weight) -> Callable[[mx.array], mx.array] | None:
    """Return the kernel for a product with as few rows as x has; None where there is none."""
    rows = x.size // weight.shape[1] if weight.weight.size else 0
    if not 0 < rows <= MATVEC_ROWS:
        return None

    instance = NF4Program("matvec", x.dtype, *_form(weight), row_tile(rows))
    backend = SPEC.choose(instance, rows, NF4Sizes(weight.shape))
    if backend == "reference":
        return None
    return functools.partial(_matvec, backend, weight)


def _form(weight: NF4Weight) -> tuple[mx.Dtype, int, bool]:
    return _word_dtype(weight.shape[1]), weight.block_size, weight.double_quant


def _dequantized(backend: str, weight: NF4Weight, dtype: mx.Dtype) -> mx.array:
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
    rows = x.shape[0]
    outputs, depth = weight.shape
    inputs, template = _kernel_inputs(weight, x.dtype)
    tile = row_tile(rows)
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
    nested = offset = dynamic_map()  # without double quantization they are not read
    if weight.double_quant:
        nested = weight.nested_absmax
        offset = weight.offset

    inputs = [weight.weight.flatten().view(word), weight.absmax, dynamic_map(), nested, offset]
    template = {"T": dtype, "W": word, "A": weight.absmax.dtype, "BLOCK": weight.block_size}
    return [*inputs, level_table()], template


def checks(backend: str, instance: NF4Program) -> list[Check]:
    """Return small inputs with tails in all directions and blocks across rows."""
    rows = instance.row_tile
    if instance.kernel == "dequantize":
        rows = MATVEC_ROWS + 1
    elif rows == ROW_TILES[-1]:
        rows += 3  # a second tile, with a tail

    depth = 264
    if instance.word != mx.uint32:
        depth += 2
    # two nested blocks, a tail
    outputs = tiles((NESTED_BLOCK_SIZE + 1) * instance.block, depth) | 1
    sizes = NF4Sizes((outputs, depth))
    return [check_of(backend, instance, rows, sizes, exact) for exact in (True, False)]


def workload(backend: str, instance: NF4Program, rows: int, sizes: NF4Sizes) -> Check:
    """Return inputs of a call; a weight is dequantized for a product with many rows."""
    if instance.kernel == "dequantize":
        rows = _MANY_ROWS
    return check_of(backend, instance, rows, sizes, exact=False)


def check_of(backend: str, instance: NF4Program, rows: int, sizes: NF4Sizes, exact: bool) -> Check:
    """Return a seeded weight of these sizes and rows of x; exact ones have levels -1, 0 and 1."""
    outputs, depth = sizes.weight
    drawn = _drawn_weight(outputs, depth, instance.block, instance.double_quant, exact)
    matvec = functools.partial(_matvec, backend, drawn) if rows <= MATVEC_ROWS else None

    def by_kernel(x: mx.array) -> list[mx.array]:
        return [nf4_product(x, drawn, matvec, functools.partial(_dequantized, backend))]

    def by_reference(x: mx.array) -> list[mx.array]:
        return [x @ reference_dequantize(drawn, x.dtype).T]

    draw = sparse_signs if exact else normal
    x = draw((rows, depth), 0).astype(instance.dtype)
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
        for rows in (1, _MANY_ROWS)
    ]


def instance_of(
    dtype: mx.Dtype, rows: int, shape: tuple[int, int], block_size: int, double_quant: bool
) -> Instance:
    """Return the instance of a product with a weight [O, D]: by `matvec`, or dequantized."""
    outputs, depth = shape
    form = (dtype, _word_dtype(depth), block_size, double_quant)
    many = rows > MATVEC_ROWS
    compiled = NF4Program("matvec", *form, row_tile(rows))
    rows_of_call = rows
    if many:
        compiled = NF4Program("dequantize", *form)
        rows_of_call = outputs

    kind = "nf4 double" if double_quant else "nf4"
    name = f"{dtype_name(dtype)} {kind} {depth} to {outputs} rows {rows}"
    return Instance(SPEC, name, (compiled, rows_of_call, NF4Sizes(shape)))


SPEC = KernelSpec(OP, checks, workload=workload)
