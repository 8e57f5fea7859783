"""The launches of kernels/multi_lora, checks against the reference, and what they cost."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

from ..runtime import dtype_name, mx
from ._backend import Instance, Kernel, KernelSpec, table, with_plain_gradient
from ._check import Check, seeded
from .grouped_lora import factor_dtype
from .grouped_lora_kernel import (
    UP_COLUMNS,
    UP_THREADS,
    check_widths,
    down_chunk,
    fits_launch,
    four,
    rank_template,
    row_tile,
    tails,
)
from .multi_lora import OP, Arrays, reference
from .profile import tiles


def _row_tiles(rows: int) -> int:
    return tiles(rows, 4 * row_tile(rows))


_DOWN = Kernel(
    OP,
    "multi_lora_down",
    ("x", "pack", "a0", "a1", "a2", "a3", "sizes"),
    ("h",),
    "{shared} float4 tile[DEPTH * ROWS4];\n"
    "multi_down<T, F, ROWS4, R0, R1, R2, R3>"
    "(x, pack, a0, a1, a2, a3, sizes, h, tile, {group}, {thread});",
    includes=("grouped_lora",),
)


@functools.cache
def _up_kernel(ranks: tuple[int, ...]) -> Kernel:
    """Return one line for each slice: groups along y are tiles of columns, slice after slice."""
    lines = [
        "{shared} float4 tile[TILE];",
        "const int p = pack_of(pack, {group}.z, sizes[2]);",
        "int first_tile = 0;",
    ]

    for i, rank in enumerate(ranks):
        lines += [
            f"const int tiles{i} = (sizes[{3 + i}] + UP_COLUMNS - 1) / UP_COLUMNS;",
            f"if (int({{group}}.y) >= first_tile && int({{group}}.y) < first_tile + tiles{i})",
            f"  multi_up_slice<T, F, ROWS4, {rank}, {sum(ranks)}>(y{i}, h, b{i}, scales{i}, p,"
            f" sizes[0], sizes[1], {sum(ranks[:i])}, sizes[{3 + i}], out{i}, tile,"
            " (int({group}.y) - first_tile) * UP_COLUMNS + int({thread}) * 4, {group}, {thread});",
            f"first_tile += tiles{i};",
        ]

    slices = range(len(ranks))
    inputs = [f"{name}{i}" for name in ("y", "b", "scales") for i in slices]

    return Kernel(
        OP,
        f"multi_lora_up_{'_'.join(map(str, ranks))}",
        (*inputs, "h", "pack", "sizes"),
        tuple(f"out{i}" for i in slices),
        "\n".join(lines),
        UP_THREADS,
        includes=("grouped_lora",),
    )


class BatchProgram(NamedTuple):
    """The parameters for which one program is compiled."""

    dtype: mx.Dtype
    factors: mx.Dtype
    ranks: tuple[int, ...]
    row_tile: int  # in fours


class BatchSizes(NamedTuple):
    """The sizes on which the cost depends besides the rows."""

    sequences: int
    inputs: int
    widths: tuple[int, ...]
    packs: int


def compute(
    x: mx.array,
    outputs: Arrays,
    lora_a: Arrays,
    lora_b: Arrays,
    scales: Arrays,
    pack: mx.array,
) -> list[mx.array]:
    """Return `multi_lora` by a kernel, or by the reference where that is faster."""
    sequences, rows, depth = x.shape
    ranks = tuple(a.shape[-1] for a in lora_a)
    factors = factor_dtype(x.dtype, [*lora_a, *lora_b])
    instance = BatchProgram(x.dtype, factors, ranks, row_tile(rows))
    widths = tuple(y.shape[-1] for y in outputs)
    sizes = BatchSizes(sequences, depth, widths, lora_a[0].shape[0])

    backend = "reference"
    if all(y.dtype == x.dtype for y in outputs):
        backend = SPEC.choose(instance, rows, sizes, fits_launch(ranks))
    if backend == "reference":
        return reference(x, outputs, lora_a, lora_b, scales, pack)
    return by_kernel(backend, x, outputs, lora_a, lora_b, scales, pack)


def by_kernel(
    backend: str,
    x: mx.array,
    outputs: Arrays,
    lora_a: Arrays,
    lora_b: Arrays,
    scales: Arrays,
    pack: mx.array,
    chunk: int | None = None,
) -> list[mx.array]:
    """Return `multi_lora` by the kernels of a backend, whatever the cost model estimates.

    ``chunk`` is the columns of x of one group, a multiple of DEPTH, where a check chooses them.
    """
    dtype = factor_dtype(x.dtype, [*lora_a, *lora_b])
    factors = [v.astype(dtype) for v in (*lora_a, *lora_b)]
    scales = [v.astype(mx.float32) for v in scales]
    pack = pack.astype(mx.int32)

    def kernel(x: mx.array, *rest: mx.array) -> list[mx.array]:
        outputs, a, b, scales = _by_kind(rest)
        return _up(backend, outputs, b, scales, pack, _down(backend, x, a, pack, chunk))

    def plain(x: mx.array, *rest: mx.array) -> list[mx.array]:
        return reference(x, *_by_kind(rest), pack)

    return list(with_plain_gradient(kernel, plain)(x, *outputs, *factors, *scales))


def _by_kind(values: Arrays) -> list[Arrays]:
    """Return the outputs, A's, B's and scales of the slices."""
    slices = len(values) // 4
    return [values[k * slices : (k + 1) * slices] for k in range(4)]


def _down(backend: str, x: mx.array, a: Arrays, pack: mx.array, chunk: int | None) -> mx.array:
    """Return h, [B, parts, T, sum(R)]: each part is the product over a chunk of D."""
    sequences, rows, depth = x.shape
    ranks = [v.shape[-1] for v in a]
    chunk = chunk or down_chunk(sequences * _row_tiles(rows), depth)
    parts = tiles(depth, chunk)

    (h,) = _DOWN.launch(
        backend,
        [x, pack, *four(a, a[0]), table((rows, depth, chunk, a[0].shape[0]))],
        {"T": x.dtype, "F": a[0].dtype, "ROWS4": row_tile(rows), **rank_template(ranks)},
        (_row_tiles(rows), parts, sequences),
        [((sequences, parts, rows, sum(ranks)), mx.float32)],
    )
    return h


def _up(
    backend: str, outputs: Arrays, b: Arrays, scales: Arrays, pack: mx.array, h: mx.array
) -> list[mx.array]:
    sequences, parts, rows, _ = h.shape
    ranks = tuple(v.shape[1] for v in b)
    widths = [y.shape[-1] for y in outputs]

    return _up_kernel(ranks).launch(
        backend,
        [*outputs, *b, *scales, h, pack, table((rows, parts, b[0].shape[0], *widths))],
        {
            "T": outputs[0].dtype,
            "F": b[0].dtype,
            "ROWS4": row_tile(rows),
            "TILE": max(ranks) * row_tile(rows),
        },
        (_row_tiles(rows), sum(tiles(width, UP_COLUMNS) for width in widths), sequences),
        [(y.shape, y.dtype) for y in outputs],
    )


def checks(backend: str, instance: BatchProgram) -> list[Check]:
    """Return small inputs with tails in rows and columns, exact and random, for one instance."""
    widths = check_widths(instance.ranks)
    return [
        check_of(backend, instance, rows, BatchSizes(3, depth, widths, 3), exact, (2, -1, 0), chunk)
        for rows, depth, chunk, exact in tails(instance.row_tile, 1)
    ]


def check_of(
    backend: str,
    instance: BatchProgram,
    rows: int,
    sizes: BatchSizes,
    exact: bool = False,
    pack: Sequence[int] | None = None,
    chunk: int | None = None,
) -> Check:
    """Return seeded inputs of these sizes; every scale is a power of two.

    ``pack`` of each sequence is by default one after the other. It and ``scales`` are long enough
    for kernels to read them in place. ``chunk`` is as of `by_kernel`.
    """
    dtype, factors, ranks, _ = instance
    sequences, depth, widths, packs = sizes
    s = len(ranks)
    pack = pack or [i % packs for i in range(sequences)]
    index = mx.array([*pack, *[-1] * (8 - sequences)], dtype=mx.int32)

    def kernel(x: mx.array, *rest: mx.array) -> list[mx.array]:
        return by_kernel(backend, x, *_by_kind(rest), index, chunk)

    def plain(x: mx.array, *rest: mx.array) -> list[mx.array]:
        return reference(x, *_by_kind(rest), index)

    shapes = [(sequences, rows, depth), *((sequences, rows, width) for width in widths)]
    shapes += [(packs, depth, rank) for rank in ranks]
    shapes += [(packs, rank, width) for rank, width in zip(ranks, widths, strict=True)]
    drawn = seeded(shapes, exact)
    drawn = [v.astype(dtype if i <= s else factors) for i, v in enumerate(drawn)]
    drawn += [mx.array([2.0 ** ((i + p) % 4 - 1) for p in range(max(packs, 8))]) for i in range(s)]
    name = f"{'exact' if exact else 'random'} {sequences} x {rows} x {depth}"

    return Check(name, kernel, plain, drawn, exact)


def instances() -> list[Instance]:
    """Return instances of q, k, v of Qwen3-4B at rank 16 with 4 packs: decode and prefill."""
    return [
        instance_of(dtype, sequences, rows)
        for dtype in (mx.float32, mx.bfloat16, mx.float16)
        for sequences, rows in ((1, 1), (8, 1), (64, 1), (4, 128))
    ]


def instance_of(dtype: mx.Dtype, sequences: int, rows: int) -> Instance:
    """Return the instance of q, k, v of Qwen3-4B for these sequences, of so many rows each."""
    compiled = BatchProgram(dtype, dtype, (16, 16, 16), row_tile(rows))
    sizes = BatchSizes(sequences, 2560, (4096, 1024, 1024), 4)
    name = f"{dtype_name(dtype)} rank 16 2560 to 4096/1024/1024 sequences {sequences} rows {rows}"
    return Instance(SPEC, name, (compiled, rows, sizes))


SPEC = KernelSpec(OP, checks, workload=check_of)
