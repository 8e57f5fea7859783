"""Dequantize MLX's quantized weights; on CPUs by array operations, which are vectorized.

`mx.dequantize` takes weights one at a time there. Four-bit codes are spread over bytes two at a
time, which needs three operations on half as many bytes as there are weights.
"""

import mlx.core as mx

from ..runtime import on_cpu


def dequantize(
    weight: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    group_size: int,
    bits: int,
    mode: str,
) -> mx.array:
    """Return what `mx.dequantize` gives, bit-identical: [O, D] of weight [O, D * bits / 32], uint32.

    It is for slices, since on CPUs it takes three times their memory.
    """
    if not (on_cpu() and mode == "affine" and bits in (4, 8) and scales.dtype == mx.float32):
        return mx.dequantize(weight, scales, biases, group_size=group_size, bits=bits, mode=mode)
    codes = weight.view(mx.uint8)
    if bits == 4:
        pairs = codes.astype(mx.uint16)  # 00ab to 0a0b, whose lower byte comes first
        codes = ((pairs | (pairs << 4)) & 0x0F0F).view(mx.uint8)
    codes = codes.reshape(*scales.shape, group_size).astype(mx.float32)
    return (codes * scales[..., None] + biases[..., None]).reshape(len(weight), -1)
