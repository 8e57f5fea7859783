"""Low-rank deltas of a batch whose sequences use different packs, in serving and training.

Each sequence of the batch names its pack, or none; the base projections run once for all of them
and only the small factors differ.

S-LoRA: https://arxiv.org/abs/2311.03285   Punica: https://arxiv.org/abs/2310.18547
"""

from collections.abc import Sequence

from ..runtime import mx
from . import dispatch
from .grouped_lora import factor_dtype
from .profile import profile

OP = "multi_lora"
Arrays = Sequence[mx.array]


def multi_lora(
    x: mx.array,
    outputs: Sequence[mx.array],
    lora_a: Sequence[mx.array],
    lora_b: Sequence[mx.array],
    scales: Sequence[mx.array],
    pack: mx.array,
) -> list[mx.array]:
    """Return the base outputs of a projection group with the deltas of each sequence's pack added.

    Semantics: y[i][b] = outputs[i][b] + scales[i][p] * (x[b] @ lora_a[i][p]) @ lora_b[i][p],
    p = pack[b]; outputs[i][b], bit-identical, where there is no pack.

    The kernels read ``scales`` and ``pack`` in place if they have 8 numbers or more; shorter ones
    are copied at each call, so pad them once if many layers share them.

    Args:
        x: [B, T, D], any float dtype; products accumulate in float32.
        outputs: What the frozen projections made of the same input, [B, T, O_i] for each slice.
        lora_a: [P, D, R_i] of each slice, in float32 or the dtype of x. R_i is the largest rank
            among the packs, the others are padded with zeros. A slice with R_i = 0 keeps its
            output.
        lora_b: [P, R_i, O_i] of each slice, likewise.
        scales: [P] or longer, of each slice: alpha / rank of the pack, by its own rank.
        pack: int32, [B] or longer; -1 is none. It is on the device and is not read here:
            the caller checks it. Any number that is no pack counts as none.

    Returns:
        [B, T, O_i] each, in the dtype of its base output.
    """
    adapted = [i for i, a in enumerate(lora_a) if a.size]
    if x.size == 0 or not adapted:
        return list(outputs)

    slices = [[v[i] for i in adapted] for v in (outputs, lora_a, lora_b, scales)]
    compute = kernels.compute if (kernels := dispatch.kernels(OP)) is not None else reference

    summed = list(outputs)
    for i, y in zip(adapted, compute(x, *slices, pack), strict=True):
        summed[i] = y
    return summed


def reference(
    x: mx.array,
    outputs: Arrays,
    lora_a: Arrays,
    lora_b: Arrays,
    scales: Arrays,
    pack: mx.array,
) -> list[mx.array]:
    """Return the same by plain MLX, for slices with a rank: two gathered products for each."""
    pack = pack[: x.shape[0]]
    index = mx.clip(pack, 0, lora_a[0].shape[0] - 1)
    present = (pack == index)[:, None, None]
    if x.dtype != mx.float64:  # float32 is the only dtype of gather_mm on a CPU
        x = x.astype(profile().dtype or factor_dtype(x.dtype, [*lora_a, *lora_b]))

    summed = []
    for y, a, b, scale in zip(outputs, lora_a, lora_b, scales, strict=True):
        scales_of_rows = scale[index][:, None, None].astype(x.dtype)
        h = _gathered_product(x, a, index) * scales_of_rows  # [B, T, R]
        delta = _gathered_product(h, b, index).astype(y.dtype)
        summed.append(mx.where(present, y + delta, y))
    return summed


def _gathered_product(x: mx.array, factors: mx.array, index: mx.array) -> mx.array:
    """Return x[b] @ factors[index[b]] without a copy of the factors for each sequence."""
    if x.dtype == mx.float64 or dispatch.detect() == "cuda":  # gather_mm lacks float64, of checks
        return x @ factors[index].astype(x.dtype)  # and reads misaligned addresses with CUDA
    return mx.gather_mm(x, factors.astype(x.dtype), rhs_indices=index)
