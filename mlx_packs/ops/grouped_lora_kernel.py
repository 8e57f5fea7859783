"""The launches of kernels/grouped_lora, checks against the reference, and what they cost."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..runtime import dtype_name, mx
from ._backend import Instance, Kernel, KernelSpec, table, with_plain_gradient
from ._check import Check, seeded
from .dispatch import forced
from .grouped_lora import MOST_ROWS, OP, Arrays, Layout, factor_dtype, layout_of, reference
from .profile import tiles

DEPTH = 256  # columns of a staged tile
MAX_SLICES = 4  # pointers of a launch
MAX_RANK = 64  # registers
MAX_RANKS = 256  # threads
# Four rows of a float4 each: few for decoding, more where a tile of A or B is read again by each.
FEW_ROWS4 = 1
MANY_ROWS4 = 4
WANTED_GROUPS = 64  # below that many the columns of x are split, so that all cores read
UP_THREADS = 64
UP_COLUMNS = 256
_MOST_SHARED = 512  # rows times rank of projections that share x, for which one launch is faster


def row_tile(rows: int) -> int:
    """Return the rows of a tile, in fours."""
    return FEW_ROWS4 if rows <= 4 * FEW_ROWS4 else MANY_ROWS4


def down_chunk(row_tiles: int, depth: int) -> int:
    """Return the columns of x of one group: fewer if row tiles are few, so that all cores read."""
    column_tiles = tiles(depth, DEPTH)
    parts = min(column_tiles, tiles(WANTED_GROUPS, row_tiles))
    return tiles(column_tiles, parts) * DEPTH


def four(values: Sequence, empty: object) -> list:
    """Return values for the four places that a launch has for slices."""
    return [*values, *[empty] * (MAX_SLICES - len(values))]


_DOWN = Kernel(
    OP,
    "grouped_lora_down",
    ("x", "a0", "a1", "a2", "a3", "sizes"),
    ("h",),
    "{shared} float4 tile[DEPTH * ROWS4];\n"
    "down<T, F, ROWS4, R0, R1, R2, R3>(x, a0, a1, a2, a3, sizes, h, tile, {group}, {thread});",
)
# Where sizes has them, for up to 8 slices.
_STRIDE = 3 + 8
_OFFSET = 3 + 16


@functools.cache
def _up_kernel(layout: Layout) -> Kernel:
    """Return a kernel with a line for each slice: groups along y are tiles of columns."""
    lines = ["{shared} float4 tile[TILE];", "const int row0 = {group}.x * 4 * ROWS4;"]
    lines += ["int first_tile = 0;"]

    for i, (rank, m) in enumerate(zip(layout.ranks, layout.output_of, strict=True)):
        b = "h"  # of rank 0, where it is not read
        f = "float"
        if rank:
            b = f"b{i}"
            f = "F"
        lines += [
            f"const int tiles{i} = (sizes[{3 + i}] + UP_COLUMNS - 1) / UP_COLUMNS;",
            f"if (int({{group}}.y) >= first_tile && int({{group}}.y) < first_tile + tiles{i})",
            f"  up_slice<T, {f}, ROWS4, {rank}>(y{m}, h, {b}, scales[{i}], sizes[0], sizes[1],"
            f" sizes[2], {layout.firsts[i]}, sizes[{3 + i}], sizes[{_STRIDE + i}],"
            f" sizes[{_OFFSET + i}], out{m}, tile, row0,"
            " (int({group}.y) - first_tile) * UP_COLUMNS + int({thread}) * 4, {thread});",
            f"first_tile += tiles{i};",
        ]

    outputs = range(len(layout.strides))
    inputs = [f"y{m}" for m in outputs] + [f"b{i}" for i in layout.adapted]

    # the text depends on the rank and the output of each slice
    shape = "_".join(f"{rank}at{m}" for rank, m in zip(layout.ranks, layout.output_of, strict=True))

    return Kernel(
        OP,
        f"grouped_lora_up_{shape}",
        (*inputs, "h", "scales", "sizes"),
        tuple(f"out{m}" for m in outputs),
        "\n".join(lines),
        UP_THREADS,
    )


def compute(
    x: mx.array, outputs: Arrays, lora_a: Arrays, lora_b: Arrays, scales: Sequence[float]
) -> list[mx.array]:
    """Return `grouped_lora` by a kernel, or by the reference where that is faster."""
    layout = layout_of(outputs, lora_b, scales)
    backend = _backend_of(x, outputs, [*lora_a, *lora_b], layout)
    if backend == "reference":
        return reference(x, outputs, lora_a, lora_b, scales)
    return by_kernel(backend, x, outputs, lora_a, lora_b, scales)


def by_kernel(
    backend: str,
    x: mx.array,
    outputs: Arrays,
    lora_a: Arrays,
    lora_b: Arrays,
    scales: Sequence[float],
    chunk: int | None = None,
) -> list[mx.array]:
    """Return `grouped_lora` by the kernels of a backend, whatever the cost model estimates.

    ``chunk`` is the columns of x of one group, a multiple of DEPTH, where a check chooses them.
    """
    layout = layout_of(outputs, lora_b, scales)
    flat_x = x.reshape(-1, x.shape[-1])
    flat = [y.reshape(-1, y.shape[-1]) for y in outputs]
    factors = [part[i] for part in (lora_a, lora_b) for i in layout.adapted]
    dtype = factor_dtype(x.dtype, factors)
    factors = [v.astype(dtype) for v in factors]

    summed = _differentiable(backend, layout, chunk)(flat_x, *flat, *factors)
    return [s.reshape(y.shape) for s, y in zip(summed, outputs, strict=True)]


@functools.cache
def _differentiable(
    backend: str, layout: Layout, chunk: int | None
) -> Callable[..., Sequence[mx.array]]:
    """Return (x, *outputs, *A, *B) to sums."""
    m = len(layout.strides)
    s = len(layout.adapted)

    def kernel(x: mx.array, *rest: mx.array) -> list[mx.array]:
        h = _down(backend, layout, x, rest[m : m + s], chunk)
        return _up(backend, layout, rest[:m], rest[m + s :], h)

    return with_plain_gradient(kernel, _of_adapted(reference, layout))


def _of_adapted(op: Callable[..., list[mx.array]], layout: Layout) -> Callable[..., list[mx.array]]:
    """Return an op as a function of x, outputs, and A's and B's of adapted slices alone."""
    m = len(layout.strides)
    s = len(layout.adapted)

    def call(x: mx.array, *rest: mx.array) -> list[mx.array]:
        a = [mx.zeros((x.shape[-1], 0)) for _ in layout.ranks]
        b = [mx.zeros((0, width)) for width in layout.widths]
        for at, i in enumerate(layout.adapted, m):
            a[i] = rest[at]
            b[i] = rest[at + s]
        return op(x, rest[:m], a, b, layout.scales)

    return call


def rank_template(ranks: Sequence[int]) -> dict[str, int]:
    """Return the template arguments for the ranks of adapted slices."""
    return {f"R{j}": rank for j, rank in enumerate(four(ranks, 0))}


def _down(backend: str, layout: Layout, x: mx.array, a: Arrays, chunk: int | None) -> mx.array:
    """Return h, [parts, N, RANKS]: each part is the product over a chunk of D."""
    rows, depth = x.shape
    rows4 = row_tile(rows)
    chunk = chunk or down_chunk(tiles(rows, 4 * rows4), depth)
    parts = tiles(depth, chunk)
    ranks = [r for r in layout.ranks if r]

    (h,) = _DOWN.launch(
        backend,
        [x, *four(a, a[0]), table((rows, depth, chunk))],
        {"T": x.dtype, "F": a[0].dtype, "ROWS4": rows4, **rank_template(ranks)},
        (tiles(rows, 4 * rows4), parts, 1),
        [((parts, rows, sum(ranks)), mx.float32)],
    )
    return h


def _sizes(layout: Layout, rows: int, h: mx.array) -> mx.array:
    values = [rows, h.shape[0], h.shape[2]]
    strides = [layout.strides[m] for m in layout.output_of]
    for columns in (layout.widths, strides, layout.offsets):
        values += [*columns, *[0] * (8 - len(columns))]
    return table(tuple(values))


def _up(backend: str, layout: Layout, outputs: Arrays, b: Arrays, h: mx.array) -> list[mx.array]:
    rows = outputs[0].shape[0]
    rows4 = row_tile(rows)
    column_tiles = sum(tiles(width, UP_COLUMNS) for width in layout.widths)

    return _up_kernel(layout).launch(
        backend,
        [*outputs, *b, h, table(layout.scales, mx.float32), _sizes(layout, rows, h)],
        {
            "T": outputs[0].dtype,
            "F": b[0].dtype,
            "ROWS4": rows4,
            "TILE": max(layout.ranks) * rows4,
        },
        (tiles(rows, 4 * rows4), column_tiles, 1),
        [(y.shape, y.dtype) for y in outputs],
    )


class GroupProgram(NamedTuple):
    """The parameters for which one program is compiled."""

    dtype: mx.Dtype
    factors: mx.Dtype
    ranks: tuple[int, ...]
    outputs: tuple[int, ...]  # of each slice
    row_tile: int  # in fours


class GroupSizes(NamedTuple):
    """The sizes on which the cost depends besides the rows."""

    inputs: int
    widths: tuple[int, ...]


def _backend_of(x: mx.array, outputs: Arrays, factors: Arrays, layout: Layout) -> str:
    if x.size == 0 or not any(layout.ranks) or any(y.dtype != x.dtype for y in outputs):
        return "reference"

    rows = x.size // x.shape[-1]
    factors = [v for v in factors if v.size]
    instance = GroupProgram(
        x.dtype, factor_dtype(x.dtype, factors), layout.ranks, layout.output_of, row_tile(rows)
    )

    supported = fits_launch(layout.ranks) and (rows <= MOST_ROWS or forced() is not None)
    return SPEC.choose(instance, rows, GroupSizes(x.shape[-1], layout.widths), supported)


def fits_launch(ranks: Sequence[int]) -> bool:
    """Return whether a launch takes slices of these ranks."""
    return len(ranks) <= MAX_SLICES and max(ranks) <= MAX_RANK and sum(ranks) <= MAX_RANKS


def checks(backend: str, instance: GroupProgram) -> list[Check]:
    """Return inputs with tails in rows and columns, exact and random, for one kernel instance."""
    widths = check_widths(instance.ranks)
    return [
        check_of(backend, instance, rows, GroupSizes(depth, widths), exact, chunk)
        for rows, depth, chunk, exact in tails(instance.row_tile, 3)
    ]


def tails(row_tile: int, few: int) -> list[tuple[int, int, int, bool]]:
    """Return rows, columns of x, columns of a group, and whether exact, of two checks.

    A group takes two tiles of the columns of x in one of them, and three in the other. ``few`` are
    the rows of the first check of the smallest tile.
    """
    rows = (few, 4) if row_tile == FEW_ROWS4 else (4 * row_tile + 3, 4 * row_tile + 2)
    return [
        (rows[0], 2 * DEPTH + 44, 2 * DEPTH, True),
        (rows[1], 2 * DEPTH + 46, 3 * DEPTH, False),
    ]


def check_widths(ranks: Sequence[int]) -> tuple[int, ...]:
    """Return columns of slices, of which none is a whole number of tiles."""
    return tuple(max(rank, (UP_COLUMNS + 43, 37, 22, 52)[i % 4]) for i, rank in enumerate(ranks))


def check_of(
    backend: str,
    instance: GroupProgram,
    rows: int,
    sizes: GroupSizes,
    exact: bool = False,
    chunk: int | None = None,
) -> Check:
    """Return seeded inputs of these sizes; a scale for each slice, powers of two.

    ``chunk`` is as of `by_kernel`.
    """
    dtype, factors, ranks, output_of, _ = instance
    depth, widths = sizes
    scales = tuple((2.0, 0.5, 1.0, 4.0)[i % 4] for i in range(len(ranks)))

    strides = [0] * (max(output_of) + 1)
    for m, width in zip(output_of, widths, strict=True):
        strides[m] += width

    layout = Layout(ranks, widths, output_of, (), scales, tuple(strides))
    kernel = _of_adapted(functools.partial(by_kernel, backend, chunk=chunk), layout)
    plain = _of_adapted(reference, layout)

    shapes = [(rows, depth), *((rows, stride) for stride in strides)]
    shapes += [(depth, ranks[i]) for i in layout.adapted]
    shapes += [(ranks[i], widths[i]) for i in layout.adapted]
    drawn = seeded(shapes, exact)
    drawn = [v.astype(dtype if i <= len(strides) else factors) for i, v in enumerate(drawn)]

    name = f"{'exact' if exact else 'random'} {rows} x {depth}"
    return Check(name, kernel, plain, drawn, exact)


def instances() -> list[Instance]:
    """Return instances of q, k, v of Qwen3-4B and of its o: one row, and 32."""
    return [
        instance_of(dtype, rows, depth, (rank,) * len(widths), widths)
        for dtype in (mx.float32, mx.bfloat16, mx.float16)
        for rank in (8, 16, 64)
        for depth, widths in ((2560, (4096, 1024, 1024)), (4096, (2560,)))
        for rows in (1, 32)
    ]


def instance_of(
    dtype: mx.Dtype,
    rows: int,
    depth: int,
    ranks: tuple[int, ...],
    widths: tuple[int, ...],
    output_of: tuple[int, ...] | None = None,
) -> Instance:
    """Return the instance of a group of these sizes; by default each slice is an output."""
    output_of = output_of or tuple(range(len(widths)))
    compiled = GroupProgram(dtype, dtype, ranks, output_of, row_tile(rows))
    rank = "/".join(map(str, sorted(set(ranks))))
    name = f"{dtype_name(dtype)} rank {rank} {depth} to {'/'.join(map(str, widths))} rows {rows}"
    return Instance(SPEC, name, (compiled, rows, GroupSizes(depth, widths)))


def slower(instance: GroupProgram, rows: int, _: GroupSizes) -> bool:
    """Return whether plain MLX is expected to be faster, by benchmarks/kernel_plans.py on Macs."""
    if instance.factors != instance.dtype:  # MLX would cast them first
        return False
    adapted = [rank for rank in instance.ranks if rank]
    return len(adapted) == 1 or rows * max(adapted) > _MOST_SHARED


SPEC = KernelSpec(OP, checks, slower, check_of)
