"""Low-rank deltas of projections that read the same input.

q, k and v (or gate and up) share ``x``, so ``x @ A`` is one product over all A's: ``x`` is read
once for the whole group. Each delta is added where its base output is and never exists on its own.
This is the reference; grouped_lora_kernel.py launches the kernels of kernels/grouped_lora.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ..runtime import mx
from . import dispatch
from .profile import profile

OP = "grouped_lora"
# What the kernels are for: generation, and what scores or embeds a few short texts. Beyond,
# whatever they win is lost in a step of training (benchmarks/LOG.md).
MOST_ROWS = 64
Arrays = Sequence[mx.array]


def grouped_lora(
    x: mx.array,
    outputs: Sequence[mx.array],
    lora_a: Sequence[mx.array],
    lora_b: Sequence[mx.array],
    scales: Sequence[float],
) -> list[mx.array]:
    """Return the base outputs of a projection group with their low-rank deltas added.

    Semantics: y[slice i] = outputs[slice i] + scales[i] * (x @ lora_a[i]) @ lora_b[i]

    Args:
        x: [..., D], any float dtype; products run in it and accumulate in float32.
        outputs: What the frozen projections made of the same input, [..., O] each. A fused
            projection has several slices; they fill the columns of its output in order.
        lora_a: [D, R_i] of each slice; masters in float32, or the dtype of x in generation.
            R_i = 0 leaves a slice as it is.
        lora_b: [R_i, O_i] of each slice, likewise.
        scales: alpha_i / R_i of each slice.

    Returns:
        [..., O] each, in the dtype of its base output.

    LoRA: https://arxiv.org/abs/2106.09685
    """
    layout_of(outputs, lora_b, scales)
    compute = kernels.compute if (kernels := dispatch.kernels(OP)) is not None else reference
    return compute(x, outputs, lora_a, lora_b, scales)


def reference(
    x: mx.array, outputs: Arrays, lora_a: Arrays, lora_b: Arrays, scales: Sequence[float]
) -> list[mx.array]:
    """Return the same by plain MLX: for many rows one product with all A's, then ``addmm``."""
    present = [a for a in lora_a if a.shape[1]]
    if not present:
        return list(outputs)

    rows = x.reshape(-1, x.shape[-1])  # [N, D]
    if stacks(rows.shape[0], [a.shape[1] for a in present]):
        hidden = rows @ mx.concatenate(present, axis=1).astype(x.dtype)
        hidden = mx.split(hidden, _edges(present), axis=1)
    else:
        hidden = [rows @ a.astype(x.dtype) for a in present]
    return with_deltas(outputs, hidden, lora_b, scales)


def shared_input(x: mx.array, lora_a: Arrays) -> tuple[mx.array, list[mx.array]]:
    """Return x for the frozen projections, and its products with every A for `with_deltas`.

    The gradient of x by the adapters is added to that by the projections in one product, where the
    sum of two gradients would be a pass over both.

    Args:
        x: [..., D], any float dtype.
        lora_a: [D, R_i] of each slice; masters in float32.

    Returns:
        [..., D], and [N, R_i] of each slice, in the dtype of x.
    """
    width = x.shape[-1]

    @mx.custom_function
    def shared(x: mx.array, a: mx.array) -> tuple[mx.array, mx.array]:
        return x, x.reshape(-1, width) @ a

    @shared.vjp
    def shared_vjp(primals: Arrays, cotangents: Arrays, _: Arrays) -> tuple[mx.array, mx.array]:
        x, a = primals
        dx, dh = cotangents
        total = mx.addmm(dx.reshape(-1, width), dh, a.T)
        return total.reshape(x.shape), x.reshape(-1, width).T @ dh

    x, hidden = shared(x, mx.concatenate(lora_a, axis=1).astype(x.dtype))
    return x, mx.split(hidden, _edges(lora_a), axis=1)


def _edges(lora_a: Arrays) -> list[int]:
    """Return where the columns of each A but the first begin."""
    return list(itertools.accumulate(a.shape[1] for a in lora_a))[:-1]


def with_deltas(
    outputs: Arrays, hidden: Arrays, lora_b: Arrays, scales: Sequence[float]
) -> list[mx.array]:
    """Return `grouped_lora` from x @ A: ``hidden`` has [N, R] of every slice with a rank."""
    layout = layout_of(outputs, lora_b, scales)
    remaining = iter(hidden)
    summed = []
    for m, y in enumerate(outputs):
        slices = [i for i, at in enumerate(layout.output_of) if at == m]
        parts = [y]
        if len(slices) > 1:
            parts = mx.split(y, [layout.offsets[i] for i in slices[1:]], axis=-1)

        for j, i in enumerate(slices):
            if layout.ranks[i] == 0:
                continue
            h = next(remaining).astype(y.dtype)
            flat = parts[j].reshape(-1, layout.widths[i])
            b = lora_b[i]
            alpha = scales[i]
            is_large = profile().saves_passes and h.shape[0] > MOST_ROWS
            if alpha != 1 and is_large:  # the gradient of ``alpha`` would read all of dy
                b = alpha * b
                alpha = 1.0

            delta = mx.addmm(flat, h, b.astype(y.dtype), alpha=alpha)
            parts[j] = delta.reshape(*y.shape[:-1], layout.widths[i])

        total = mx.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]
        summed.append(total)
    return summed


def stacks(rows: int, ranks: Sequence[int]) -> bool:
    """Return whether one product over the stacked A's moves less than one for each; it copies A."""
    return rows * (len(ranks) - 1) > 2 * sum(ranks)


def factor_dtype(dtype: mx.Dtype, factors: Arrays) -> mx.Dtype:
    """Return the dtype in which kernels read factors: the activations' dtype, else float32."""
    if all(v.dtype == dtype for v in factors):
        return dtype
    return mx.float32


@dataclass(frozen=True)
class Layout:
    """The places of a group's slices: by slice its rank, width, output, first column, scale."""

    ranks: tuple[int, ...]
    widths: tuple[int, ...]
    output_of: tuple[int, ...]
    offsets: tuple[int, ...]
    scales: tuple[float, ...]
    strides: tuple[int, ...]  # columns of each output

    @property
    def adapted(self) -> list[int]:
        """Slices with a rank."""
        return [i for i, rank in enumerate(self.ranks) if rank]

    @property
    def firsts(self) -> list[int]:
        """First column of each slice among the ranks of all."""
        return [sum(self.ranks[:i]) for i in range(len(self.ranks))]


def layout_of(outputs: Arrays, lora_b: Arrays, scales: Sequence[float]) -> Layout:
    """Return the places of slices; raises ValueError if they do not fill the outputs."""
    strides = tuple(y.shape[-1] for y in outputs)
    return _layout(strides, tuple(b.shape for b in lora_b), tuple(scales))


@functools.cache
def _layout(
    strides: tuple[int, ...], shapes: tuple[tuple[int, int], ...], scales: tuple[float, ...]
) -> Layout:
    ranks = tuple(rank for rank, _ in shapes)
    widths = tuple(width for _, width in shapes)
    output_of = []
    offsets = []
    m = 0
    column = 0

    for width in widths:
        output_of.append(m)
        offsets.append(column)
        column += width
        if m < len(strides) and column == strides[m]:
            m += 1
            column = 0

    if m != len(strides) or column:
        raise ValueError(
            f"[grouped_lora] slices of {list(widths)} columns must fill outputs of {list(strides)}."
        )
    return Layout(ranks, widths, tuple(output_of), tuple(offsets), scales, strides)
