"""Low-rank deltas of projections that read the same input.

q, k and v (or gate and up) share ``x``, so ``x @ A`` is one product over the stacked A's: ``x`` is
read once for the whole group. The deltas are added where the base outputs are, with ``addmm``; they
never exist at full width on their own.
"""

from collections.abc import Sequence

import mlx.core as mx


def grouped_lora(
    x: mx.array,
    outputs: Sequence[mx.array],
    lora_a: Sequence[mx.array],
    lora_b: Sequence[mx.array],
    scales: Sequence[float],
) -> list[mx.array]:
    """Base outputs of a projection group with their low-rank deltas added.

    Semantics: y[i] = outputs[i] + scales[i] * (x @ lora_a[i]) @ lora_b[i]

    Args:
        x: [..., D], any float dtype; products run in it and accumulate in float32.
        outputs: what the frozen projections made of the same input, [..., O_i] each.
        lora_a: [D, R_i] each, masters in float32.   lora_b: [R_i, O_i] each, masters in float32.
        scales: alpha_i / R_i of each slice.
    Returns: [..., O_i] each, in the dtype of its base output.

    LoRA: https://arxiv.org/abs/2106.09685
    """
    rows = x.reshape(-1, x.shape[-1])  # [N, D]
    stacked = lora_a[0] if len(lora_a) == 1 else mx.concatenate(lora_a, axis=1)
    hidden = rows @ stacked.astype(x.dtype)  # [N, sum(R)]
    deltas, start = [], 0
    for y, b, scale in zip(outputs, lora_b, scales, strict=True):
        h = hidden[:, start : start + b.shape[0]]
        start += b.shape[0]
        flat = y.reshape(-1, y.shape[-1])
        summed = mx.addmm(flat, h.astype(y.dtype), b.astype(y.dtype), alpha=scale)
        deltas.append(summed.reshape(y.shape))
    return deltas
