"""Few rows by the affine weights of a projection group, with low-rank deltas and what follows.

Decoding multiplies one row, or a few, by 4-bit or 8-bit weights. The first launch makes the products
of all projections that read the row, and of their A's; the second adds the low-rank terms where
another launch is needed anyway: in SwiGLU, in the norms of q and k. lora_qmv_launches.py has the
reference and the launches, kernels/lora_qmv the text and the plan.

LoRA: https://arxiv.org/abs/2106.09685   QLoRA: https://arxiv.org/abs/2305.14314
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from ..chips import BANDWIDTH_REACHED
from ..runtime import dtype_name, mx
from ._backend import choose, detect, forced, measured, tiles
from ._check import Check, Instance, seeded
from ._cost import CACHE_FACTOR, Launch, level, product
from .lora_qmv_launches import (
    COLUMNS,
    LANES,
    OP,
    OUTPUTS,
    ROW_TILES,
    AffineWeight,
    Factors,
    Format,
    Launches,
    Norm,
    Norms,
    Task,
    prepared,
    reference,
    row_tile,
)

MAX_ROWS = ROW_TILES[-1]
MAX_SLICES, MAX_RANK = 4, 64
GROUP_SIZES, BITS = (32, 64, 128), (4, 8)


def prepare(  # noqa: PLR0913 (what a launch depends on)
    shape: Sequence[int],
    dtype: mx.Dtype,
    weights: Sequence[AffineWeight],
    form: Format,
    factors: Factors,
    norms: Norms = (),
    gated: bool = False,
) -> Launches | None:
    """Return the function that computes a projection group, for many calls; None: use plain MLX.

    Semantics: y[i] = x @ dequantize(weights[i]).T + x @ A[i] @ B[i]
    then rms_norm of each head of y[i] where there is one, or silu(y[0]) * y[1] if ``gated``.

    It is for decoding and has no gradient.

    Args:
        shape: [..., D] of x, of at most `MAX_ROWS` rows.
        dtype: of x, scales and factors.
        weights: of each projection that reads x; they are frozen.
        form: how all of them are quantized.
        factors: of each projection.
        norms: of each projection, or none at all.
        gated: whether the two outputs are gate and up of SwiGLU.

    Returns:
        A function of x that returns [..., O] of each projection, or of gate and up together.
    """
    task = Task(form, factors.ranks, norms or (None,) * len(weights), gated)
    backend = _backend_of(shape, dtype, weights, task)
    if backend == "reference":
        return None
    return prepared(backend, shape, dtype, weights, factors, task)


class Compiled(NamedTuple):
    """The parameters for which the two programs are compiled."""

    dtype: mx.Dtype
    group_size: int
    bits: int
    row_tile: int
    ranks: tuple[int, ...]
    heads: tuple[int, ...]
    gated: bool


class Sizes(NamedTuple):
    """The sizes on which the cost depends besides the rows."""

    inputs: int
    widths: tuple[int, ...]


def _backend_of(
    shape: Sequence[int], dtype: mx.Dtype, weights: Sequence[AffineWeight], task: Task
) -> str:
    *leading, depth = shape
    rows = math.prod(leading)
    if not 0 < rows <= MAX_ROWS or any(w.scales.dtype != dtype for w in weights):
        return "reference"
    if any(n is not None and n.weight.dtype != dtype for n in task.norms):
        return "reference"
    instance = Compiled(dtype, *task.form, row_tile(rows), task.ranks, task.heads, task.gated)
    sizes = Sizes(depth, tuple(w.weight.shape[0] for w in weights))
    reason = unsupported(instance, sizes.widths)
    # the model leaves out the weights, since `qmv` has the layout of MLX's kernel for Metal
    if detect() == "cuda" and not (forced() or measured("cuda", (OP, instance, rows, sizes))):
        reason = reason or "not measured here (packs doctor)"
    return choose(
        OP,
        instance,
        rows,
        sizes,
        lambda backend: checks(backend, instance),
        lambda: plans(rows, instance, sizes),
        reason,
    )


def unsupported(instance: Compiled, widths: Sequence[int]) -> str | None:
    """Return why there is no launch for a group, if it is so."""
    if instance.group_size not in GROUP_SIZES or instance.bits not in BITS:
        return f"weights of {instance.bits} bits in groups of {instance.group_size}"
    if len(instance.ranks) > MAX_SLICES or max(instance.ranks) > MAX_RANK:
        return "more slices or ranks than a launch can hold"
    if any(
        head % LANES or (head and width % head)
        for head, width in zip(instance.heads, widths, strict=True)
    ):
        return "heads that simdgroups cannot share"
    return None


def checks(backend: str, instance: Compiled) -> list[Check]:
    """Return inputs with tails in columns, outputs and rows for one instance; exact and random.

    The lanes take several turns over the columns, the last of them not all lanes.
    """
    rows = {1: 1, 2: 2, 4: 3, 8: 7}[instance.row_tile]
    depth = 2 * LANES * 16 + 128
    widths = check_widths(instance)
    plain = not (instance.gated or any(instance.heads))
    return [
        check_of(backend, instance, rows, depth, widths, exact)
        for exact in ((True, False) if plain else (False,))
    ]


def check_widths(instance: Compiled) -> tuple[int, ...]:
    """Return outputs of slices, of which none is a whole number of tiles but those of heads."""
    if instance.gated:
        return (LANES * COLUMNS + 11,) * 2
    some = (LANES * COLUMNS + 5, 19, 6, 9)
    return tuple(
        2 * head if head else max(rank, some[i])
        for i, (rank, head) in enumerate(zip(instance.ranks, instance.heads, strict=True))
    )


def check_of(
    backend: str,
    instance: Compiled,
    rows: int,
    depth: int,
    widths: Sequence[int],
    exact: bool,
) -> Check:
    """Return a seeded row or more for a group with seeded weights and factors of these sizes."""
    dtype, form = instance.dtype, Format(instance.group_size, instance.bits)
    least = (
        -4 if exact else -4 - form.bits
    )  # random sums of any size stay within float16, gated too
    weights = [
        _seeded_weight(width, depth, form, dtype, i, least) for i, width in enumerate(widths)
    ]
    shapes = [(rows, depth), *((depth, r) for r in instance.ranks)]
    shapes += [(r, width) for r, width in zip(instance.ranks, widths, strict=True)]
    x, *drawn = seeded(shapes, exact)
    a, b = drawn[: len(widths)], drawn[len(widths) :]
    a, b = ([v if v.size else None for v in part] for part in (a, b))
    scales = [2.0 if exact else 0.03] * len(widths)
    factors = Factors.of(a, b, scales, dtype)
    norms = [
        Norm((1 + seeded([(head,)], True)[0] / 4).astype(dtype), 2.0) if head else None
        for head in instance.heads
    ]
    task = Task(form, instance.ranks, norms, instance.gated)

    def kernel(x: mx.array) -> list[mx.array]:
        launches = prepared(backend, x.shape, dtype, weights, factors, task)
        return launches(mx.stop_gradient(x))

    def plain(x: mx.array) -> list[mx.array]:
        x = mx.stop_gradient(x)
        if x.dtype != mx.float64:
            return reference(x, weights, factors, task)
        double = [None if v is None else v.astype(mx.float64) for v in (factors.down, *factors.up)]
        of_norms = [n and Norm(n.weight.astype(mx.float64), n.eps) for n in norms]
        exactly = Factors(double[0], tuple(double[1:]))
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
        instance_of(Compiled(dtype, 64, 4, rows, (16,) * len(widths), heads, gated), depth, widths)
        for dtype in (mx.bfloat16, mx.float16)
        for depth, widths, heads, gated in groups
        for rows in (1, 8)
    ]


def instance_of(compiled: Compiled, depth: int, widths: tuple[int, ...]) -> Instance:
    """Return the instance of a group of these sizes, with as many rows as it is compiled for."""
    dtype, _, bits, rows, ranks, *_ = compiled
    rank = "/".join(map(str, sorted(set(ranks))))
    return Instance(
        OP,
        f"{dtype_name(dtype)} {bits} bits rank {rank} {depth} to {'/'.join(map(str, widths))}"
        f" rows {rows}",
        (compiled, rows, Sizes(depth, widths)),
        lambda backend: checks(backend, compiled),
        lambda backend: check_of(backend, compiled, rows, depth, widths, exact=False),
    )


def plans(rows: int, instance: Compiled, sizes: Sizes) -> tuple[list[Launch], list[Launch]]:
    """Return launches of plain MLX with factors in the same dtype, and of the kernels.

    The weights are left out: both read them once, and that takes most of the time. Our kernel reads x
    from a cache for every four outputs; what of that takes longer than the weights counts.
    """
    e, n, d, total = instance.dtype.size, rows, sizes.inputs, sum(instance.ranks)
    each = list(zip(instance.ranks, instance.heads, sizes.widths, strict=True))
    plain = level(
        [*(Launch("x W", e * n * (d + o)) for *_, o in each), product("x A", e, n, d, total)]
    )
    adapted = [(r, o) for r, _, o in each if r]
    plain += level([Launch("y + h B", e * (2 * n * o + n * r + r * o)) for r, o in adapted])
    plain += level([Launch("norm", 2 * e * n * o) for _, head, o in each if head])
    outputs = e * n * sum(sizes.widths)
    if instance.gated:
        plain += [Launch("SwiGLU", 1.5 * outputs)]
        outputs /= 2
    between = 4 * n * (total + sum(sizes.widths))  # y and h in float32
    factors = e * sum(r * o for r, o in adapted)
    again = e * n * d * tiles(sum(sizes.widths), OUTPUTS) * BANDWIDTH_REACHED / CACHE_FACTOR
    stored = d * sum(sizes.widths) * (instance.bits / 8 + 2 * e / instance.group_size)
    late = max(0.0, again - stored)
    kernel = [
        Launch("product", e * d * (n + total) + between + late),
        Launch("up", between + factors + outputs),
    ]
    return plain, kernel
