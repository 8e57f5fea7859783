"""DoRA: adapted weights with a magnitude for each output; in training they are never made.

DoRA: https://arxiv.org/abs/2402.09353
"""

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from .lora import GroupedLoRA
from .wrapped import Hidden

LEAST_NORM = 1e-8  # that is divided by: rows of zeros have the magnitude 0


class GroupedDoRA(GroupedLoRA):
    """Adapters of a projection group whose adapted weights have a learned magnitude.

    Semantics: y = m / ||W + s B A|| * (W x + s B A x) + bias

    The norm of each row has no gradient, as in the paper (4.3) and in PEFT. Its square is
    ||W||^2 + 2 s <W, B A> + s^2 ||B A||^2, of which the first is computed once, and the others by
    products with R rows: of the frozen weight as it is, and of A with itself.

    Dropout is only on the input of A, as in mlx-lm. ``norms`` are of the rows of the weights,
    [O_i] in float32; magnitudes begin with them.
    """

    def __init__(
        self, lora: GroupedLoRA, projections: Sequence[nn.Module], norms: Sequence[mx.array]
    ) -> None:
        super().__init__(lora._adapted, lora._scales, lora.lora_a, lora.lora_b, lora.dropout.p)
        self.magnitude = list(norms)
        self._norms = list(norms)
        self._projections = Hidden(projections)

    def decoded(self, *_: object, **__: object) -> None:
        """Return None: no kernel for decoding has magnitudes."""
        return None

    @property
    def norms(self) -> list[mx.array]:
        """The norms of the rows of each frozen weight, [O_i] in float32."""
        return self._norms

    def _replaced(self, outputs: Sequence[mx.array], summed: Sequence[mx.array]) -> list[mx.array]:
        return super()._replaced(outputs, [self._scaled(i, y) for i, y in enumerate(summed)])

    def _scaled(self, i: int, y: mx.array) -> mx.array:
        """Return the output [..., O] of an adapted projection with its magnitudes."""
        if self._kept is None or self.training:
            norms = self._computed_norms(i, y.dtype)
        else:
            norms = self._once(("norms", i), lambda: self._computed_norms(i, y.dtype))

        ratio = self.magnitude[i] / mx.maximum(norms, LEAST_NORM)
        bias = self._projections.all[i].get("bias")
        if bias is None:
            return _times(y, ratio)
        return _times(y - bias, ratio) + bias

    def _computed_norms(self, i: int, dtype: mx.Dtype) -> mx.array:
        """Return the norms of the rows of W + s B A, [O] in float32, without a gradient."""
        projection = self._projections.all[i]
        s = self._scales[i]
        a = mx.stop_gradient(self.lora_a[i])
        b = mx.stop_gradient(self.lora_b[i])

        products = projection(a.T.astype(dtype))
        if "bias" in projection:
            products = products - projection.bias

        between = (products.astype(mx.float32) * b).sum(axis=0)
        own = (((a.T @ a) @ b) * b).sum(axis=0)
        return mx.sqrt(mx.maximum(self._norms[i].square() + 2 * s * between + s * s * own, 0))


@mx.custom_function
def _times(y: mx.array, ratio: mx.array) -> mx.array:
    """Return y [..., O] times ratio [O], in the dtype of y.

    The gradient of ``ratio`` is made of the result, which what comes after keeps anyway, not of y.
    """
    return y * ratio.astype(y.dtype)


@_times.vjp
def _times_vjp(primals: tuple, cotangent: mx.array, result: mx.array) -> tuple[mx.array, mx.array]:
    y, ratio = primals
    rows = (cotangent * result).astype(mx.float32).reshape(-1, ratio.size).sum(axis=0)
    of_ratio = mx.where(ratio == 0, 0, rows / mx.where(ratio == 0, 1, ratio))
    return cotangent * ratio.astype(y.dtype), of_ratio


class DoRALinear(nn.Module):
    """DoRA that is applied and not trained: it computes what mlx-lm's and PEFT's modules compute.

    Semantics: y = m / ||W + D|| * (x (W + D)^T) + bias, rows' norms, D = scale * (A B)^T

    DoRA: https://arxiv.org/abs/2402.09353
    """

    def __init__(
        self,
        linear: nn.Module,  # quantized or dense
        weight: mx.array,  # [O, D], what it multiplies by
        lora_a: mx.array,  # [D, R]
        lora_b: mx.array,  # [R, O]
        m: mx.array,  # [O], the magnitudes
        scale: float,  # alpha / rank
        bias: mx.array | None,  # [O]
    ) -> None:
        super().__init__()
        self.linear = linear
        self.lora_a = lora_a.astype(mx.float32)
        self.lora_b = lora_b.astype(mx.float32)
        self.m = m.astype(mx.float32)

        adapted = weight.astype(mx.float32) + scale * (self.lora_a @ self.lora_b).T
        self.magnitude = self.m / mx.maximum(mx.linalg.norm(adapted, axis=1), LEAST_NORM)

        self._scale = scale
        self._bias = bias
        self.freeze()

    def __call__(self, x: mx.array) -> mx.array:
        y = self.linear(x)
        low_rank = (x.astype(mx.float32) @ self.lora_a) @ self.lora_b
        scaled = self.magnitude * (y + self._scale * low_rank)
        if self._bias is not None:  # it is in y, and has no magnitude
            scaled = scaled + (1 - self.magnitude) * self._bias
        return scaled.astype(y.dtype)
