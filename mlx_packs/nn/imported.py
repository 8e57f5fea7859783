"""DoRA that is applied and not trained: it computes what mlx-lm's and PEFT's modules compute."""

import mlx.core as mx
import mlx.nn as nn

from .dora import LEAST_NORM


class DoRALinear(nn.Module):
    """A frozen linear whose adapted weight is given a learned magnitude for each output.

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
