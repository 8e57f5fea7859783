"""Frozen weights in nvfp4 with a global scale, which MLX's own modules lack."""

import mlx.core as mx

from .frozen_weight import FROZEN, CustomEmbedding, CustomLinear, CustomWeight, QuantizedWeight

GROUP_SIZE = 16
_ONE = 0x38  # 1 as an E4M3 byte
_FORMAT = {"group_size": GROUP_SIZE, "bits": 4, "mode": "nvfp4"}


def dequantized(
    weight: mx.array, block_scales: mx.array, global_scale: mx.array, dtype: mx.Dtype
) -> mx.array:
    """Return codes times (scale / global scale), computed in float32 as compressed-tensors does.

    Args:
        weight: uint32 [O, D / 8], 4-bit floats (E2M1), the lowest bits first; of stacked experts
            [E, O, D / 8].
        block_scales: uint8 [O, D / 16] or [E, O, D / 16], E4M3.
        global_scale: float32 [1], or [E] with one for each expert.
        dtype: of the result [O, D] or [E, O, D].
    """
    ones = mx.full(block_scales.shape, _ONE, mx.uint8)
    levels = mx.dequantize(weight, ones, **_FORMAT, dtype=mx.float32)
    stack_axes = [1] * (weight.ndim - 1)
    factors = mx.from_fp8(block_scales, dtype=mx.float32)
    factors = factors / global_scale.reshape(-1, *stack_axes)

    blocks = levels.reshape(*factors.shape, GROUP_SIZE) * factors[..., None]
    return blocks.reshape(levels.shape).astype(dtype)


class _NVFP4Module(CustomWeight):
    bits = 4
    group_size = GROUP_SIZE
    mode = "nvfp4-global"
    has_kernel = True

    def __init__(self, arrays: tuple[mx.array, mx.array, mx.array], dtype: mx.Dtype) -> None:
        super().__init__()
        self.weight = arrays[0]
        self.block_scales = arrays[1]
        self.global_scale = arrays[2]
        self.dtype = dtype
        self.freeze()

    @property
    def global_scales(self) -> tuple[float, ...]:
        """One, or one for each expert."""
        return tuple(self.global_scale.tolist())


class NVFP4Linear(_NVFP4Module, CustomLinear):
    """A frozen linear with such a weight [O, D] and perhaps a bias [O]."""

    def __init__(
        self,
        arrays: tuple[mx.array, mx.array, mx.array],
        bias: mx.array | None = None,
        dtype: mx.Dtype = mx.bfloat16,
    ) -> None:
        super().__init__(arrays, dtype)
        if bias is not None:
            self.bias = bias
            self.freeze()


class NVFP4Embedding(_NVFP4Module, CustomEmbedding):
    """A frozen embedding table [V, D]; rows are dequantized as they are looked up."""


class NVFP4SwitchLinear(_NVFP4Module):
    """A frozen stack of experts [E, O, D], each with a global scale, and perhaps biases [E, O].

    Called as mlx-lm's switch linear is, in any matmul path.
    """

    def __init__(
        self,
        arrays: tuple[mx.array, mx.array, mx.array],
        bias: mx.array | None = None,
        dtype: mx.Dtype = mx.bfloat16,
    ) -> None:
        super().__init__(arrays, dtype)
        if bias is not None:
            self.bias = bias
            self.freeze()

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """Map x [..., 1, D] and the expert of each row, [...], to [..., 1, O]."""
        dtype = x.dtype
        if dtype == mx.float16:  # codes times scales would overflow
            x = x.astype(mx.float32)

        selection = {"rhs_indices": indices, "sorted_indices": sorted_indices}
        y = mx.gather_qmm(x, self.weight, self.block_scales, **selection, **_FORMAT)
        y = (y.astype(mx.float32) / self.global_scale[indices][..., None, None]).astype(dtype)

        if "bias" in self:
            y = y + mx.expand_dims(self.bias[indices], -2)
        return y


class FrozenNVFP4(QuantizedWeight):
    @property
    def shape(self) -> tuple[int, int]:
        outputs, words = self.module.weight.shape[-2:]
        return outputs, 8 * words

    @property
    def dtype(self) -> mx.Dtype:
        return self.module.dtype

    def check(self) -> None:
        stack = list(self.module.weight.shape[:-2])
        outputs, width = self.shape
        scales = list(self.module.block_scales.shape)
        global_scales = list(self.module.global_scale.shape)

        fits = scales == [*stack, outputs, width // GROUP_SIZE]
        if not fits or global_scales != (stack or [1]):
            raise ValueError(
                f"a weight of {[*stack, outputs, width]} has block scales {scales} and global "
                f"scales {global_scales}."
            )

    def dense(self) -> mx.array:
        m = self.module
        return dequantized(m.weight, m.block_scales, m.global_scale, self.dtype)

    def rows(self, at: slice | mx.array) -> mx.array:
        m = self.module
        return dequantized(m.weight[at], m.block_scales[at], m.global_scale, self.dtype)

    def product(self, x: mx.array) -> mx.array:
        """Multiply by MLX's kernel; in float16, where codes times scales overflow, by slices."""
        if x.dtype == mx.float16:
            return super().product(x)

        y = mx.quantized_matmul(x, self.module.weight, self.module.block_scales, **_FORMAT)
        return (y.astype(mx.float32) / self.module.global_scale).astype(x.dtype)

    def transient_product(self, x: mx.array) -> mx.array:
        return super().product(x)


FROZEN[_NVFP4Module] = FrozenNVFP4
