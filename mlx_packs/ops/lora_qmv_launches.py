"""The launches of `lora_qmv`, and the same by plain MLX, which comes first.

kernels/lora_qmv/README.md has the plan.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..runtime import mx
from ._backend import Kernel, padded, table, tiles

OP = "lora_qmv"


class AffineWeight(NamedTuple):
    """A frozen weight [O, D] in MLX's affine format.

    ``weight`` is uint32 [O, D * bits / 32]; ``scales`` and ``biases`` are [O, D / group].
    """

    weight: mx.array
    scales: mx.array
    biases: mx.array


class Format(NamedTuple):
    """The format of a group's weights."""

    group_size: int
    bits: int


@dataclass(frozen=True, eq=False)
class Factors:
    """Low-rank factors of a projection group, in the dtype of its activations.

    Attributes:
        down: [sum(R), D], all A's transposed, slice after slice.
        up: [R_i, O_i] of each slice, times its scale; of R_i = 0 it is None.
    """

    down: mx.array
    up: tuple[mx.array | None, ...]

    @classmethod
    def of(
        cls,
        lora_a: Sequence[mx.array | None],
        lora_b: Sequence[mx.array | None],
        scales: Sequence[float],
        dtype: mx.Dtype,
    ) -> "Factors":
        """Return A's [D, R_i] and B's [R_i, O_i] cast; a slice without an adapter has None."""
        present = [a.T for a in lora_a if a is not None]
        down = mx.concatenate(present, axis=0).astype(dtype)
        scaled = [
            None if b is None else (b * scale).astype(dtype)
            for b, scale in zip(lora_b, scales, strict=True)
        ]
        return cls(down, tuple(scaled))

    @property
    def ranks(self) -> tuple[int, ...]:
        """R of each slice."""
        return tuple(0 if b is None else b.shape[0] for b in self.up)


class Norm(NamedTuple):
    """RMSNorm of each head of a slice: ``weight`` [head], which divides O."""

    weight: mx.array
    eps: float


Norms = Sequence[Norm | None]


class Task(NamedTuple):
    """The computation, without the arrays of weights and factors."""

    form: Format
    ranks: tuple[int, ...]
    norms: Norms
    gated: bool

    @property
    def heads(self) -> tuple[int, ...]:
        """Columns that a norm takes together, 0 without a norm."""
        return tuple(0 if n is None else n.weight.size for n in self.norms)


def reference(
    x: mx.array, weights: Sequence[AffineWeight], factors: Factors, task: Task
) -> list[mx.array]:
    """Return the same by plain MLX: one product with all A's, then ``addmm`` for each slice."""
    cuts = [sum(task.ranks[: i + 1]) for i in range(len(task.ranks) - 1)]
    hidden = mx.split(x @ factors.down.T, cuts, axis=-1)
    summed = []
    for weight, h, b in zip(weights, hidden, factors.up, strict=True):
        y = _base_product(x, weight, task.form)
        summed.append(y if b is None else mx.addmm(y, h, b))
    if task.gated:
        gate, up = summed
        return [gate * mx.sigmoid(gate) * up]
    return [
        y if norm is None else _normalized(y, norm)
        for y, norm in zip(summed, task.norms, strict=True)
    ]


def _base_product(x: mx.array, weight: AffineWeight, form: Format) -> mx.array:
    if x.dtype != mx.float64:  # of checks alone; quantized products have none
        return mx.quantized_matmul(x, *weight, group_size=form.group_size, bits=form.bits)
    single = [weight.weight, *(v.astype(mx.float32) for v in weight[1:])]
    dense = mx.dequantize(*single, group_size=form.group_size, bits=form.bits)
    return x @ dense.astype(mx.float64).T


def _normalized(y: mx.array, norm: Norm) -> mx.array:
    """Return y [N, O] with each head divided by its root mean square."""
    heads = y.reshape(len(y), -1, norm.weight.size)
    if y.dtype == mx.float64:  # of checks alone
        squares = heads.square().mean(axis=-1, keepdims=True)
        return (heads * mx.rsqrt(squares + norm.eps) * norm.weight).reshape(y.shape)
    return mx.fast.rms_norm(heads, norm.weight, norm.eps).reshape(y.shape)


# As MLX's own quantized matrix-vector product: groups of two simdgroups, so that 1024 outputs fill
# all cores, and 4 outputs a simdgroup, so that x is loaded once for 4.
THREADS, LANES, OUTPUTS = 64, 32, 4
SIMDGROUPS = THREADS // LANES
ROW_TILES = (1, 2, 4, 8)  # rows that share an unpacked code
COLUMNS = 2  # of a lane of the second launch, but for norms


def row_tile(rows: int) -> int:
    """Return the rows that a launch is compiled for."""
    return next(tile for tile in ROW_TILES if rows <= tile)


def _is_finished(task: Task, i: int) -> bool:
    """Return whether the first launch makes the output of a slice."""
    return not (task.ranks[i] or task.heads[i] or task.gated)


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
    b = ["h" if i not in adapted else f"b{i}" for i in range(len(ranks))]
    taken = _second(ranks, heads, gated)
    if gated:
        b = [f"b{adapted[0]}" if name == "h" else name for name in b]  # of rank 0 it is not read
        lines += [
            f"swiglu<T, {ranks[0]}, {ranks[1]}, {_columns_of_h(ranks)}, {COLUMNS}>"
            f"(y0, y1, h, {b[0]}, {b[1]}, sizes[2], row, place * {columns}, lane, out0);"
        ]
    for i in () if gated else taken:
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
        f"{OP}_up_{'_'.join(map(str, ranks))}_{'gated' if gated else '_'.join(map(str, heads))}",
        (*inputs, "h", "eps", "sizes"),
        ("out0",) if gated else tuple(f"out{i}" for i in taken),
        "\n".join(lines),
        THREADS,
    )


def _second(ranks: Sequence[int], heads: Sequence[int], gated: bool) -> list[int]:
    """Return the slices that the second launch finishes."""
    return [i for i in range(len(ranks)) if ranks[i] or heads[i] or gated]


def _columns_of_h(ranks: Sequence[int]) -> int:
    """Return the ranks of all slices, or 8: shorter inputs would be copied (`padded`)."""
    return max(8, sum(ranks))


Launches = Callable[[mx.array], list[mx.array]]


def prepared(  # noqa: PLR0913 (what a launch depends on)
    backend: str,
    shape: Sequence[int],
    dtype: mx.Dtype,
    weights: Sequence[AffineWeight],
    factors: Factors,
    task: Task,
) -> Launches:
    """Return x of a shape [..., D] to the outputs, [..., O] each, by the kernels of a backend."""
    *leading, depth = shape
    rows = math.prod(leading)
    widths = [w.weight.shape[0] for w in weights]
    finished = tuple(_is_finished(task, i) for i in range(len(weights)))
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
    of_first, of_second = [*parts, down, sizes], [*up, *norms]

    def launch(x: mx.array) -> list[mx.array]:
        h, *y = map(padded, first(inputs=[x, *of_first]))
        summed = second(inputs=[*(y[i] for i in slices), *of_second, h, eps, sizes])
        if task.gated:
            return summed
        for i, out in zip(slices, summed, strict=True):
            y[i] = out
        return y

    return launch
