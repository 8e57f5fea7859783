"""The launches of kernels/lora_qmv, checks against the reference, and what they cost."""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from ..runtime import dtype_name, mx
from ._backend import Instance, Kernel, KernelSpec, measured, padded, table
from ._check import Check, seeded
from .dispatch import detect, forced
from .grouped_lora_kernel import GroupSizes
from .lora_qmv import (
    MAX_ROWS,
    OP,
    AffineWeight,
    Format,
    GroupTask,
    Launches,
    LowRank,
    Norm,
    reference,
)
from .profile import tiles

MAX_SLICES = 4
MAX_RANK = 64
GROUP_SIZES = (32, 64, 128)
BITS = (4, 8)
# As MLX's own quantized matrix-vector product: groups of two simdgroups, so that 1024 outputs fill
# all cores, and 4 outputs a simdgroup, so that x is loaded once for 4.
THREADS = 64
LANES = 32
OUTPUTS = 4
SIMDGROUPS = THREADS // LANES
ROW_TILES = (1, 2, 4, MAX_ROWS)  # rows that share an unpacked code
COLUMNS = 2  # of a lane of the second launch, but for norms


def row_tile(rows: int) -> int:
    """Return the rows that a launch is compiled for."""
    return next(tile for tile in ROW_TILES if rows <= tile)


@functools.cache
def _product_kernel(finished: tuple[bool, ...]) -> Kernel:
    """Return the first launch: simdgroups for the ranks, then a line for each slice."""
    lines = [
        "const int simdgroup = int({thread}) / LANES, lane = int({thread}) % LANES;",
        f"int first = (RANKS + {SIMDGROUPS - 1}) / {SIMDGROUPS};",
        "if (int({group}.x) < first)",
        "  down<T, ROWS, RANKS>(x, a, sizes[0], sizes[1],"
        f" int({{group}}.x) * {SIMDGROUPS} + simdgroup, lane, h);",
    ]

    outputs = SIMDGROUPS * OUTPUTS
    for i, whole in enumerate(finished):
        lines += [
            f"const int tiles{i} = (sizes[{2 + i}] + {outputs - 1}) / {outputs};",
            f"if (int({{group}}.x) >= first && int({{group}}.x) < first + tiles{i})",
            f"  qmv<T, {'T' if whole else 'float'}, GROUP, BITS, ROWS>"
            f"(x, w{i}, s{i}, z{i}, sizes[0], sizes[1], sizes[{2 + i}],"
            f" (int({{group}}.x) - first) * {outputs} + simdgroup * OUTPUTS, lane, y{i});",
            f"first += tiles{i};",
        ]

    slices = range(len(finished))
    inputs = [f"{name}{i}" for i in slices for name in ("w", "s", "z")]
    name = "".join("t" if whole else "f" for whole in finished)

    return Kernel(
        OP,
        f"{OP}_product_{name}",
        ("x", *inputs, "a", "sizes"),
        ("h", *(f"y{i}" for i in slices)),
        "\n".join(lines),
        THREADS,
    )


@functools.cache
def _up_kernel(ranks: tuple[int, ...], heads: tuple[int, ...], gated: bool) -> Kernel:
    """Return the second launch: a simdgroup for some columns of a row, groups along y are rows.

    Inputs are y, B and the norm of each slice, as far as it has them.
    """
    lines = [
        "const int lane = int({thread}) % LANES, row = {group}.y;",
        f"int place = int({{group}}.x) * {SIMDGROUPS} + int({{thread}}) / LANES;",
    ]

    columns = LANES * COLUMNS
    adapted = [i for i, rank in enumerate(ranks) if rank]
    absent = f"b{adapted[0]}" if gated else "h"  # B of rank 0, which is not read
    b = [f"b{i}" if rank else absent for i, rank in enumerate(ranks)]
    taken = _second(ranks, heads, gated)

    if gated:
        finish = "gated"
        outputs = ("out0",)
        lines += [
            f"swiglu<T, {ranks[0]}, {ranks[1]}, {_columns_of_h(ranks)}, {COLUMNS}>"
            f"(y0, y1, h, {b[0]}, {b[1]}, sizes[2], row, place * {columns}, lane, out0);"
        ]
    else:
        finish = "_".join(map(str, heads))
        outputs = tuple(f"out{i}" for i in taken)
        for i in taken:
            norm = f"norm{i}" if heads[i] else b[i]  # without a norm it is not read
            factor = b[i] if ranks[i] else norm
            each = heads[i] or columns
            lines += [
                f"const int places{i} = (sizes[{2 + i}] + {each - 1}) / {each};",
                f"if (place >= 0 && place < places{i})",
                f"  up<T, {ranks[i]}, {sum(ranks[:i])}, {_columns_of_h(ranks)}, {each // LANES},"
                f" {'true' if heads[i] else 'false'}>(y{i}, h, {factor}, {norm},"
                f" eps[{i}], sizes[{2 + i}], row, place * {each}, lane, out{i});",
                f"place -= places{i};",
            ]

    inputs = [f"y{i}" for i in taken] + [f"b{i}" for i in adapted]
    inputs += [f"norm{i}" for i in taken if heads[i]]
    return Kernel(
        OP,
        f"{OP}_up_{'_'.join(map(str, ranks))}_{finish}",
        (*inputs, "h", "eps", "sizes"),
        outputs,
        "\n".join(lines),
        THREADS,
    )


def _second(ranks: Sequence[int], heads: Sequence[int], gated: bool) -> list[int]:
    """Return the slices that the second launch finishes."""
    return [i for i in range(len(ranks)) if ranks[i] or heads[i] or gated]


def _columns_of_h(ranks: Sequence[int]) -> int:
    """Return the ranks of all slices, or 8: shorter inputs would be copied (`padded`)."""
    return max(8, sum(ranks))


def prepared(  # noqa: PLR0913 (what a launch depends on)
    backend: str,
    shape: Sequence[int],
    dtype: mx.Dtype,
    weights: Sequence[AffineWeight],
    factors: LowRank,
    task: GroupTask,
) -> Launches:
    """Return x of a shape [..., D] to the outputs, [..., O] each, by the kernels of a backend."""
    *leading, depth = shape
    rows = math.prod(leading)
    widths = [w.weight.shape[0] for w in weights]

    # whether the first launch makes the output of each slice
    finished = tuple(
        not (task.ranks[i] or task.heads[i] or task.gated) for i in range(len(weights))
    )

    ranks = _columns_of_h(task.ranks)
    groups = tiles(ranks, SIMDGROUPS)
    groups += sum(tiles(width, SIMDGROUPS * OUTPUTS) for width in widths)

    template = {
        "T": dtype,
        "GROUP": task.form.group_size,
        "BITS": task.form.bits,
        "ROWS": row_tile(rows),
        "RANKS": ranks,
    }

    outputs = [((rows, ranks), mx.float32)]
    for width, whole in zip(widths, finished, strict=True):
        outputs.append(((*leading, width), dtype if whole else mx.float32))
    first = _product_kernel(finished).prepared(backend, template, (groups, 1, 1), outputs)

    slices = _second(task.ranks, task.heads, task.gated)
    completed = slices[:1] if task.gated else slices
    places = sum(tiles(widths[i], task.heads[i] or LANES * COLUMNS) for i in completed)
    second = _up_kernel(task.ranks, task.heads, task.gated).prepared(
        backend,
        {"T": dtype},
        (tiles(places, SIMDGROUPS), rows, 1),
        [((*leading, widths[i]), dtype) for i in completed],
    )

    sizes = table((rows, depth, *widths))
    eps = table(tuple(0.0 if n is None else n.eps for n in task.norms), mx.float32)
    parts = [padded(part) for w in weights for part in w]
    up = [padded(b) for b in factors.up if b is not None]
    norms = [padded(norm.weight) for norm in task.norms if norm is not None]
    down = mx.pad(factors.down, ((0, ranks - len(factors.down)), (0, 0)))
    of_first = [*parts, down, sizes]
    of_second = [*up, *norms]

    def launch(x: mx.array) -> list[mx.array]:
        h, *y = map(padded, first(inputs=[x, *of_first]))
        summed = second(inputs=[*(y[i] for i in slices), *of_second, h, eps, sizes])
        if task.gated:
            return summed
        for i, out in zip(slices, summed, strict=True):
            y[i] = out
        return y

    return launch


class QmvProgram(NamedTuple):
    """The parameters for which the two programs are compiled."""

    dtype: mx.Dtype
    group_size: int
    bits: int
    row_tile: int
    ranks: tuple[int, ...]
    heads: tuple[int, ...]
    gated: bool


def launches_of(
    shape: Sequence[int],
    dtype: mx.Dtype,
    weights: Sequence[AffineWeight],
    factors: LowRank,
    task: GroupTask,
) -> Launches | None:
    """Return `prepared` where a kernel is faster than plain MLX; else None."""
    *leading, depth = shape
    rows = math.prod(leading)
    dtypes = [w.scales.dtype for w in weights]
    dtypes += [n.weight.dtype for n in task.norms if n is not None]
    if not 0 < rows <= MAX_ROWS or any(other != dtype for other in dtypes):
        return None

    instance = QmvProgram(dtype, *task.form, row_tile(rows), task.ranks, task.heads, task.gated)
    sizes = GroupSizes(depth, tuple(w.weight.shape[0] for w in weights))
    supported = fits_launch(instance, sizes.widths)
    # the rule is for Metal, where `qmv` has the layout of MLX's own kernel
    if detect() == "cuda" and not (forced() or measured("cuda", (OP, instance, rows, sizes))):
        supported = False

    backend = SPEC.choose(instance, rows, sizes, supported)
    if backend == "reference":
        return None
    return prepared(backend, shape, dtype, weights, factors, task)


def fits_launch(instance: QmvProgram, widths: Sequence[int]) -> bool:
    """Return whether there is a launch for a group."""
    if instance.group_size not in GROUP_SIZES or instance.bits not in BITS:
        return False
    if len(instance.ranks) > MAX_SLICES or max(instance.ranks) > MAX_RANK:
        return False
    return not any(  # heads that simdgroups cannot share
        head % LANES or (head and width % head)
        for head, width in zip(instance.heads, widths, strict=True)
    )


def checks(backend: str, instance: QmvProgram) -> list[Check]:
    """Return inputs with tails in columns, outputs and rows for one instance; exact and random.

    The lanes take several turns over the columns, the last of them not all lanes.
    """
    rows = {1: 1, 2: 2, 4: 3, 8: 7}[instance.row_tile]
    sizes = GroupSizes(2 * LANES * 16 + 128, check_widths(instance))
    forms = (True, False)
    if instance.gated or any(instance.heads):  # what follows the products is never exact
        forms = (False,)
    return [check_of(backend, instance, rows, sizes, exact) for exact in forms]


def check_widths(instance: QmvProgram) -> tuple[int, ...]:
    """Return outputs of slices, of which none is a whole number of tiles but those of heads."""
    if instance.gated:
        return (LANES * COLUMNS + 11,) * 2
    some = (LANES * COLUMNS + 5, 19, 6, 9)
    return tuple(
        2 * head if head else max(rank, some[i])
        for i, (rank, head) in enumerate(zip(instance.ranks, instance.heads, strict=True))
    )


def check_of(
    backend: str, instance: QmvProgram, rows: int, sizes: GroupSizes, exact: bool = False
) -> Check:
    """Return a seeded row or more for a group with seeded weights and factors of these sizes."""
    depth, widths = sizes
    dtype = instance.dtype
    form = Format(instance.group_size, instance.bits)
    least = -4
    if not exact:
        least -= form.bits  # random sums of any size stay within float16, gated too
    weights = [
        _seeded_weight(width, depth, form, dtype, i, least) for i, width in enumerate(widths)
    ]

    shapes = [(rows, depth), *((depth, r) for r in instance.ranks)]
    shapes += [(r, width) for r, width in zip(instance.ranks, widths, strict=True)]
    x, *drawn = seeded(shapes, exact)
    drawn = [v if v.size else None for v in drawn]
    a = drawn[: len(widths)]
    b = drawn[len(widths) :]
    scales = [2.0 if exact else 0.03] * len(widths)
    factors = LowRank.of(a, b, scales, dtype)

    norms: list[Norm | None] = []
    for head in instance.heads:
        norm = None
        if head:
            (drawn_weight,) = seeded([(head,)], True)
            norm = Norm((1 + drawn_weight / 4).astype(dtype), 2.0)
        norms.append(norm)

    task = GroupTask(form, instance.ranks, norms, instance.gated)

    def kernel(x: mx.array) -> list[mx.array]:
        launches = prepared(backend, x.shape, dtype, weights, factors, task)
        return launches(mx.stop_gradient(x))

    def plain(x: mx.array) -> list[mx.array]:
        x = mx.stop_gradient(x)
        if x.dtype != mx.float64:
            return reference(x, weights, factors, task)
        double = [None if v is None else v.astype(mx.float64) for v in (factors.down, *factors.up)]
        of_norms = [n and Norm(n.weight.astype(mx.float64), n.eps) for n in norms]
        exactly = LowRank(double[0], tuple(double[1:]))
        return reference(x, weights, exactly, task._replace(norms=of_norms))

    name = f"{'exact' if exact else 'random'} {rows} x {depth}"
    return Check(name, kernel, plain, [x.astype(dtype)], exact)


def _seeded_weight(
    outputs: int, depth: int, form: Format, dtype: mx.Dtype, seed: int, least: int
) -> AffineWeight:
    """Return random codes, and as scales and biases powers of two, 2^least and more."""
    keys = [mx.random.key(4 * seed + i) for i in range(4)]
    codes = outputs, depth * form.bits // 32
    low, high = (mx.random.randint(0, 1 << 16, codes, mx.uint32, key) for key in keys[:2])
    groups = outputs, depth // form.group_size
    scales, biases = (
        2.0 ** mx.random.randint(least, least + 3, groups, key=key) for key in keys[2:]
    )

    return AffineWeight(low + (high << 16), scales.astype(dtype), (-8 * biases).astype(dtype))


def instances() -> list[Instance]:
    """Return instances of the groups of Qwen3-4B at rank 16, with 1 row and 8."""
    groups = (
        (2560, (4096, 1024, 1024), (128, 128, 0), False),
        (4096, (2560,), (0,), False),
        (2560, (9728, 9728), (0, 0), True),
        (9728, (2560,), (0,), False),
    )

    return [
        instance_of(
            QmvProgram(dtype, 64, 4, rows, (16,) * len(widths), heads, gated), depth, widths
        )
        for dtype in (mx.bfloat16, mx.float16)
        for depth, widths, heads, gated in groups
        for rows in (1, 8)
    ]


def instance_of(compiled: QmvProgram, depth: int, widths: tuple[int, ...]) -> Instance:
    """Return the instance of a group of these sizes, with as many rows as it is compiled for."""
    dtype, _, bits, rows, ranks, *_ = compiled
    rank = "/".join(map(str, sorted(set(ranks))))
    columns = "/".join(map(str, widths))
    name = f"{dtype_name(dtype)} {bits} bits rank {rank} {depth} to {columns} rows {rows}"
    return Instance(SPEC, name, (compiled, rows, GroupSizes(depth, widths)))


def slower(instance: QmvProgram, rows: int, _: GroupSizes) -> bool:
    """Return whether plain MLX is expected to be faster, by benchmarks/kernel_plans.py on Macs.

    Our kernel reads x from a cache for every four outputs, which takes longer than the weights if
    x has many bytes and the weights have few. One projection gains nothing from a second launch.
    """
    return len(instance.ranks) == 1 or rows * instance.dtype.size > 2 * instance.bits


SPEC = KernelSpec(OP, checks, slower, check_of)
