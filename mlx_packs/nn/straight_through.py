"""LoRA whose sum with the frozen weight is quantized in every forward pass, as a merge will do it.

Straight-through estimator: https://arxiv.org/abs/1308.3432. Of a weight with low-rank adapters:
LR-QAT, https://arxiv.org/abs/2406.06385, which learns the scales too; here they are the format's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import mlx.nn as nn

from ..ops.grouped_lora import grouped_lora
from ..ops.lora_qmv import MAX_ROWS
from ..ops.profile import profile
from .frozen_weight import frozen_weight
from .lora import AdaptedLinear, GroupedLoRA, low_rank_delta
from .quantized import QUANTIZED, stored_weight

Arrays = Sequence[mx.array]


@dataclass(frozen=True)
class QuantizedSum:
    """A frozen weight W [O, D] that is quantized together with what its adapters add.

    Attributes:
        linear: the frozen linear.
        dtype: of W in the checkpoint, and of the sum when it is quantized.
        quantize: a dense weight [O, D] to a linear without bias, lazily.
        slices: the outputs of each slice, and the index of its adapter in the group, if it has one.
    """

    linear: nn.Module
    dtype: mx.Dtype
    quantize: Callable[[mx.array], nn.Module]
    slices: tuple[tuple[int, int | None], ...]

    @property
    def adapters(self) -> list[int]:
        """The indices of its adapters in the group."""
        return [i for _, i in self.slices if i is not None]

    def module(self, lora_a: Arrays, lora_b: Arrays, after: Arrays = ()) -> nn.Module:
        """Return the linear of Q(W + B A), which is not computed before ``after``.

        Args:
            lora_a: A [D, R] of each of `adapters`.
            lora_b: B [R, O], with its scale.
            after: any arrays.
        """
        weight = stored_weight(self.linear, self.dtype, after)
        lora_a = mx.depends(list(lora_a), list(after)) if after else lora_a
        pairs = zip(lora_a, lora_b, strict=True)
        deltas = [
            mx.zeros((width, weight.shape[1])) if i is None else low_rank_delta(*next(pairs), 1.0)
            for width, i in self.slices
        ]
        delta = deltas[0] if len(deltas) == 1 else mx.concatenate(deltas)
        return self.quantize((weight.astype(mx.float32) + delta).astype(self.dtype))


def quantized_sum_matmul(
    x: mx.array,
    lora_a: Arrays,
    lora_b: Arrays,
    scales: Sequence[float],
    sums: Sequence[QuantizedSum],
) -> list[mx.array]:
    """Return the products with quantized sums; gradients are LoRA's, as if nothing was rounded.

    Semantics: y = x @ Q(W + s (A B)^T)^T
        dx = dy @ Q(W + s (A B)^T),  dA = s x^T (dy B^T),  dB = s (x A)^T dy

    No weight is kept for the backward pass: it is made again. One after another is made, so that
    one dense weight at a time is in memory.

    Args:
        x: [..., D], any float dtype, which products have.
        lora_a: A [D, R] of each adapter of the sums, in float32.
        lora_b: B [R, O] likewise.
        scales: alpha / R of each.
        sums: frozen weights, with the indices of their adapters in these lists.

    Returns:
        [..., O] of each sum, in the dtype of x.
    """
    count = len(lora_a)

    def quantized(total: QuantizedSum, factors: Arrays, after: Arrays) -> nn.Module:
        scaled = [scales[i] * factors[count + i] for i in total.adapters]
        return total.module([factors[i] for i in total.adapters], scaled, after)

    @mx.custom_function
    def products(x: mx.array, *factors: mx.array) -> list[mx.array]:
        outputs: list[mx.array] = []
        for total in sums:
            outputs.append(multiply(x, quantized(total, factors, [x, *outputs[-1:]])))
        return outputs

    @products.vjp
    def products_vjp(primals: Arrays, cotangents: Arrays, _: Arrays) -> list[mx.array]:
        (x, *factors), of_x, gradients = primals, [], [mx.array(0.0)] * (2 * count)
        rows = x.reshape(-1, x.shape[-1])
        for total, dy in zip(sums, cotangents, strict=True):
            weight = quantized(total, factors, [dy, *of_x[-1:]])
            _, (own,) = mx.vjp(partial(multiply, module=weight), [x], [dy])
            of_x.append(of_x[-1] + own if of_x else own)
            column = 0
            for width, i in total.slices:
                if i is not None:
                    part = dy[..., column : column + width].reshape(-1, width)
                    pair = factors[i], factors[count + i]
                    of_a, of_b = _gradients(rows, part, *pair, scales[i])
                    gradients[i], gradients[count + i] = of_a, of_b
                column += width
        return [of_x[-1], *gradients]

    outputs = products(x, *lora_a, *lora_b)
    return [outputs] if isinstance(outputs, mx.array) else list(outputs)


def _gradients(
    rows: mx.array, dy: mx.array, a: mx.array, b: mx.array, scale: float
) -> tuple[mx.array, mx.array]:
    """Return dA and dB in float32, by products in the dtype of the rows [N, D] and [N, O]."""
    hidden = rows @ a.astype(rows.dtype)
    back = dy @ (scale * b).astype(rows.dtype).T
    return (rows.T @ back).astype(a.dtype), scale * (hidden.T @ dy).astype(b.dtype)


def multiply(x: mx.array, module: nn.Module) -> mx.array:
    """Return the product of x [..., D] with the weight of a frozen linear, without its bias."""
    if not isinstance(module, QUANTIZED):
        return profile().matmul(x, module.weight)
    return frozen_weight(module).transient_product(x)


class QuantizedSums:
    """The quantized sums of a group, by the place of their projection in it."""

    def __init__(self, sums: Mapping[int, QuantizedSum]) -> None:
        self.all = dict(sums)


class StraightThroughLoRA(GroupedLoRA):
    """Adapters of a projection group, of which each adapted weight is quantized as it will be merged.

    Semantics: y = Q(W + s B A) x + bias, where the gradient takes Q for the identity

    Without a rank (A [D, 0]) it computes y = W x + bias, and in training before it ``rounds`` what
    LoRA does: y = W x + s B A x + bias.

    Args:
        lora: the group that it takes the place of.
        sums: the adapted projections, by their place in the group.
    """

    keeps_on_cpu = True

    def __init__(self, lora: GroupedLoRA, sums: Mapping[int, QuantizedSum]) -> None:
        nn.Module.__init__(self)
        self._slots, self._scales, self._kept = lora._slots, lora._scales, None
        self.dropout = lora.dropout
        self.lora_a, self.lora_b = list(lora.lora_a), list(lora.lora_b)
        self._sums = QuantizedSums(sums)
        self.rounding = mx.zeros((1,))
        self.freeze(recurse=False, keys="rounding")

    @property
    def rounds(self) -> bool:
        """Whether weights are quantized in training.

        The size of an array says so: functions that are compiled with the state of the module as an
        input are traced again when it changes.
        """
        return self.rounding.size > 0

    @rounds.setter
    def rounds(self, value: bool) -> None:
        if value != self.rounds:
            self.rounding = mx.zeros((int(value),))

    def decoded(self, *_: object, **__: object) -> None:
        """Return None: decoding takes the quantized sums."""
        return None

    def project(
        self, x: mx.array, projections: Sequence[Callable[[mx.array], mx.array]]
    ) -> list[mx.array]:
        """Return the outputs of all projections of x [..., D], [..., O_i] each."""
        sums = self._sums.all
        places = [i for i in range(len(projections)) if i in sums]
        products = iter(self._products(x, [(i, sums[i]) for i in places]))
        outputs = []
        for i, projection in enumerate(projections):
            if i not in sums:
                outputs.append(projection(x))
                continue
            bias = sums[i].linear.get("bias")
            outputs.append(next(products) if bias is None else next(products) + bias)
        return outputs

    def _products(self, x: mx.array, sums: Sequence[tuple[int, QuantizedSum]]) -> list[mx.array]:
        """Return the products of x with quantized sums, without their biases."""
        if not any(a.shape[-1] for a in self.lora_a):
            return [multiply(x, total.linear) for _, total in sums]
        if self.training and not self.rounds:
            return [self._unrounded(x, total) for _, total in sums]
        if self._kept is None or self.training:
            factors = self.lora_a, self.lora_b, self._scales
            return quantized_sum_matmul(x, *factors, [total for _, total in sums])
        modules = [self._once(("quantized", i), partial(self._module, total)) for i, total in sums]
        few = x.size <= MAX_ROWS * x.shape[-1]
        return [module(x) if few else multiply(x, module) for module in modules]

    def _unrounded(self, x: mx.array, total: QuantizedSum) -> mx.array:
        """Return the product with a sum as it is."""
        a, b, scales = [], [], []
        for width, i in total.slices:
            a.append(mx.zeros((x.shape[-1], 0)) if i is None else self.lora_a[i])
            b.append(mx.zeros((0, width)) if i is None else self.lora_b[i])
            scales.append(0.0 if i is None else self._scales[i])
        return grouped_lora(x, [multiply(x, total.linear)], a, b, scales)[0]

    def _module(self, total: QuantizedSum) -> nn.Module:
        indices = total.adapters
        scaled = [self._scales[i] * self.lora_b[i] for i in indices]
        return total.module([self.lora_a[i] for i in indices], scaled)


class StraightThroughLinear(AdaptedLinear):
    """A frozen linear whose sum with its adapters is quantized: of one slice, or of several."""

    def __call__(self, x: mx.array) -> mx.array:
        """Map x [..., D] to [..., O]."""
        return self.lora.project(x, [self.linear])[0]
