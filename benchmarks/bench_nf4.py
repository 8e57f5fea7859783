"""Products with an NF4 weight: dequantized once, quantized in plain MLX, and quantized with kernels.

python -m benchmarks.bench_nf4
"""

import functools
import sys
from collections.abc import Iterator

from mlx_packs.ops import dispatch, nf4
from mlx_packs.runtime import mx

from . import op_race
from .op_race import Contest

SHAPES = {"qwen3_0_6b q": (2048, 1024), "qwen3_4b q": (4096, 2560), "qwen3_4b down": (2560, 9728)}


def contests() -> Iterator[Contest]:
    """Few rows and many, double-quantized."""
    dtype = op_race.activation_dtype()
    for name, (outputs, depth) in SHAPES.items():
        for rows in (1, 8, 512):
            prepared = functools.partial(prepare, dtype, rows, outputs, depth)
            yield Contest(f"{name}, {rows} rows", str(dtype).rsplit(".", 1)[-1], prepared)


def prepare(dtype: mx.Dtype, rows: int, outputs: int, depth: int) -> op_race.Calls:
    """A seeded weight and rows, and the calls on them."""
    weight = nf4.quantize(mx.random.normal((outputs, depth), key=mx.random.key(0)) * 0.02)
    x = mx.random.normal((rows, depth), key=mx.random.key(1)).astype(dtype)
    dense = nf4.dequantize(weight, dtype)
    mx.eval(x, dense)

    def ours(backend):
        def call():
            with dispatch.backend(backend):
                return [nf4.matmul(x, weight)]

        return call

    results = {"dense, kept": lambda: [x @ dense.T], "mlx_packs plain MLX": ours("reference")}
    if name := op_race.kernel_backend():
        results[f"mlx_packs {name} kernel"] = ours(name)
    return results


if __name__ == "__main__":
    sys.exit(op_race.main("nf4", contests()))
