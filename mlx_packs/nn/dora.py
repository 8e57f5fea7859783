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
        self._ratios: list[mx.array] | None = None

    def decoded(self, *_: object, **__: object) -> None:
        """Return None: no kernel for decoding has magnitudes."""
        return None

    @property
    def norms(self) -> list[mx.array]:
        """The norms of the rows of each frozen weight, [O_i] in float32."""
        return self._norms

    def fix(self) -> list[mx.array]:
        """Let factors and magnitudes stay as they are, and return what is computed of them once."""
        self._ratios = [self._ratio(i, mx.float32) for i in range(len(self.magnitude))]
        return self._ratios

    def _replaced(self, outputs: Sequence[mx.array], summed: Sequence[mx.array]) -> list[mx.array]:
        return super()._replaced(outputs, [self._scaled(i, y) for i, y in enumerate(summed)])

    def _scaled(self, i: int, y: mx.array) -> mx.array:
        """Return the output [..., O] of an adapted projection with its magnitudes."""
        ratio = self._ratios[i] if self._ratios else self._ratio(i, y.dtype)
        bias = self._projections.all[i].get("bias")
        if bias is None:
            return _times(y, ratio)
        return _times(y - bias, ratio) + bias

    def _ratio(self, i: int, dtype: mx.Dtype) -> mx.array:
        """Return the magnitudes over the norms of the rows of W + s B A, [O] in float32."""
        if self._kept is None or self.training:
            norms = self._computed_norms(i, dtype)
        else:
            norms = self._once(("norms", i), lambda: self._computed_norms(i, dtype))
        return self.magnitude[i] / mx.maximum(norms, LEAST_NORM)

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
