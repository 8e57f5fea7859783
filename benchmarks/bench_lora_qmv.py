"""Decoding through a projection group on 4-bit weights: mlx-lm's LoRALinears, plain MLX, our kernels.

A call goes through several groups with weights of their own, each after the one before, as the
blocks of a model do: a group alone would find its weights in the cache.

    python -m benchmarks.bench_lora_qmv
"""

import functools
import sys
from collections.abc import Callable, Iterator, Sequence

import mlx.nn as nn
from mlx_lm.tuner.lora import LoRALinear

from mlx_packs.ops.lora_qmv import AffineWeight, Format, GroupTask, LowRank, reference
from mlx_packs.ops.lora_qmv_kernel import prepared
from mlx_packs.runtime import mx

from . import op_race
from .op_race import Contest

GROUPS = {  # D, widths, whether they are gate and up
    "qwen3_0_6b q/k/v": (1024, (2048, 1024, 1024), False),
    "qwen3_4b q/k/v": (2560, (4096, 1024, 1024), False),
    "qwen3_4b o": (4096, (2560,), False),
    "qwen3_4b gate/up": (2560, (9728, 9728), True),
    "qwen3_4b down": (9728, (2560,), False),
    "qwen3_8b q/k/v": (4096, (4096, 1024, 1024), False),
}
BLOCKS, RANK, SCALE = 8, 16, 2.0
FORM = Format(64, 4)
Group = Callable[[mx.array], list[mx.array]]


def contests() -> Iterator[Contest]:
    """Every group with one row and with eight."""
    dtype = op_race.activation_dtype()
    for name, sizes in GROUPS.items():
        for rows in (1, 8):
            prepare_sizes = functools.partial(prepare, dtype, rows, *sizes)
            shape = f"{name} of {BLOCKS} blocks, {rows} rows, rank {RANK}"
            yield Contest(shape, str(dtype).rsplit(".", 1)[-1], prepare_sizes)


def prepare(
    dtype: mx.Dtype, rows: int, depth: int, widths: Sequence[int], gated: bool
) -> op_race.Calls:
    """Seeded rows and groups, and the calls on them."""
    x = mx.random.normal((rows, depth), key=mx.random.key(0)).astype(dtype)
    by_implementation: dict[str, list[Group]] = {}
    for block in range(BLOCKS):
        for name, group in _group(dtype, rows, depth, widths, gated, block).items():
            by_implementation.setdefault(name, []).append(group)
    return {
        name: functools.partial(_chain, groups, x) for name, groups in by_implementation.items()
    }


def _chain(groups: Sequence[Group], x: mx.array) -> list[mx.array]:
    """Outputs of each group on the same rows, none begun before the last group has ended."""
    outputs: list[mx.array] = []
    for group in groups:
        start = mx.depends(x, outputs[-1:]) if outputs else x
        outputs += group(start)
    return outputs


def _group(
    dtype: mx.Dtype, rows: int, depth: int, widths: Sequence[int], gated: bool, seed: int
) -> dict[str, Group]:
    """One group by every implementation."""
    normal = functools.partial(mx.random.normal, key=mx.random.key(seed))
    dense = [(0.02 * normal((width, depth))).astype(dtype) for width in widths]
    weights = [AffineWeight(*mx.quantize(w, FORM.group_size, FORM.bits)) for w in dense]
    a = [0.02 * normal((depth, RANK)) for _ in widths]
    b = [0.1 * normal((RANK, width)) for width in widths]
    factors = LowRank.of(a, b, [SCALE] * len(widths), dtype)
    task = GroupTask(FORM, factors.ranks, (None,) * len(widths), gated)
    layers = [_mlx_lm_layer(depth, *of) for of in zip(weights, a, b, strict=True)]
    mx.eval(weights, a, b, factors.down, factors.up)

    def mlx_lm(x: mx.array) -> list[mx.array]:
        outputs = [layer(x) for layer in layers]
        return [nn.silu(outputs[0]) * outputs[1]] if gated else outputs

    results: dict[str, Group] = {
        "mlx-lm LoRALinear": mlx_lm,
        "mlx_packs plain MLX": lambda x: reference(x, weights, factors, task),
    }
    if name := op_race.kernel_backend():
        kernel = prepared(name, (rows, depth), dtype, weights, factors, task)
        results[f"mlx_packs {name} kernel"] = kernel
    return results


def _mlx_lm_layer(depth: int, weight: AffineWeight, a: mx.array, b: mx.array) -> nn.Module:
    """mlx-lm's LoRALinear on a quantized linear with this weight."""
    linear = nn.QuantizedLinear(depth, b.shape[1], False, FORM.group_size, FORM.bits)
    linear.weight, linear.scales, linear.biases = weight
    layer = LoRALinear.from_base(linear, r=RANK, scale=SCALE).eval()
    layer.lora_a, layer.lora_b = a, b
    return layer


if __name__ == "__main__":
    sys.exit(op_race.main("lora_qmv", contests()))
