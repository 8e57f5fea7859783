"""Few rows by the affine weights of a projection group, with low-rank deltas and what follows.

Decoding multiplies one row, or a few, by 4-bit or 8-bit weights. The first launch makes the
products of all projections that read the row, and of their A's; the second adds the low-rank terms
where another launch is needed anyway: in SwiGLU, in the norms of q and k. This is the reference;
lora_qmv_kernel.py has the launches, kernels/lora_qmv the text and the plan.

LoRA: https://arxiv.org/abs/2106.09685   QLoRA: https://arxiv.org/abs/2305.14314
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..runtime import mx
from . import dispatch

OP = "lora_qmv"
MAX_ROWS = 8  # of x

Launches = Callable[[mx.array], list[mx.array]]


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
class LowRank:
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
    ) -> "LowRank":
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


class GroupTask(NamedTuple):
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
    x: mx.array, weights: Sequence[AffineWeight], factors: LowRank, task: GroupTask
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


def prepare(  # noqa: PLR0913 (what a launch depends on)
    shape: Sequence[int],
    dtype: mx.Dtype,
    weights: Sequence[AffineWeight],
    form: Format,
    factors: LowRank,
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
    kernels = dispatch.kernels(OP)
    if kernels is None:
        return None

    task = GroupTask(form, factors.ranks, norms or (None,) * len(weights), gated)
    return kernels.launches_of(shape, dtype, weights, factors, task)
