"""Low-rank deltas of q, k and v: mlx-lm's LoRALinear one by one, ours in plain MLX, our kernels.

The frozen products are left out: each implementation gets their outputs.

    python -m benchmarks.bench_grouped_lora
"""

import functools
import sys
from collections.abc import Callable, Iterator, Sequence

from mlx_lm.tuner.lora import LoRALinear

from mlx_packs.ops import dispatch, grouped_lora
from mlx_packs.runtime import mx

from . import op_race
from .op_race import Contest

GEOMETRIES = {  # D, and the widths of q, k, v
    "qwen3_0_6b": (1024, (2048, 1024, 1024)),
    "qwen3_4b": (2560, (4096, 1024, 1024)),
    "qwen3_8b": (4096, (4096, 1024, 1024)),
}
SCALE = 2.0


def implementations(widths: Sequence[int], rank: int) -> dict[str, Callable]:
    """Calls (x, outputs, A, B) to summed outputs."""

    layers = [LoRALinear(1, 1, r=rank, scale=SCALE).eval() for _ in widths]

    def mlx_lm(x, outputs, a, b):
        summed = []
        for layer, y, p, q in zip(layers, outputs, a, b, strict=True):
            layer.linear, layer.lora_a, layer.lora_b = (lambda _, y=y: y), p, q
            summed.append(layer(x))
        return summed

    def ours(backend):
        def call(x, outputs, a, b):
            with dispatch.backend(backend):
                return grouped_lora.grouped_lora(x, outputs, a, b, [SCALE] * len(a))

        return call

    results = {"mlx-lm LoRALinear": mlx_lm, "mlx_packs plain MLX": ours("reference")}
    if name := op_race.kernel_backend():
        results[f"mlx_packs {name} kernel"] = ours(name)
    return results


def contests() -> Iterator[Contest]:
    """Forward, and all gradients, at each geometry, rank and number of rows."""
    dtype = op_race.activation_dtype()
    for name, (depth, widths) in GEOMETRIES.items():
        for rank in (8, 16, 64):
            for rows in (1, 8, 512, 4096):
                for what in ("forward", "gradients"):
                    yield Contest(
                        f"{name} q/k/v, {rows} rows, rank {rank}, {what}",
                        str(dtype).rsplit(".", 1)[-1],
                        functools.partial(prepare, dtype, rows, depth, widths, rank, what),
                    )


def prepare(dtype, rows, depth, widths, rank, what) -> op_race.Calls:
    """Seeded inputs, and the calls on them."""
    x, *outputs = (
        mx.random.normal((rows, w), key=mx.random.key(i)).astype(dtype)
        for i, w in enumerate((depth, *widths))
    )
    a = [mx.random.normal((depth, rank), key=mx.random.key(9)) * 0.02 for _ in widths]
    b = [mx.random.normal((rank, w), key=mx.random.key(8)) * 0.1 for w in widths]
    if what == "forward":  # as in generation
        a, b = ([v.astype(dtype) for v in part] for part in (a, b))
    mx.eval(x, outputs, a, b)
    calls = implementations(widths, rank)
    if what == "gradients":
        calls = {name: _gradients(call) for name, call in calls.items()}
    return {n: functools.partial(call, x, outputs, a, b) for n, call in calls.items()}


def _gradients(call: Callable) -> Callable:
    """All gradients of the sum of squares of a call's outputs, flat."""

    def loss(*values):
        return sum(y.astype(mx.float32).square().mean() for y in call(*values))

    def gradients(*values):
        dx, dy, da, db = mx.grad(loss, argnums=(0, 1, 2, 3))(*values)
        return [dx, *dy, *da, *db]

    return gradients


if __name__ == "__main__":
    sys.exit(op_race.main("grouped_lora", contests()))
