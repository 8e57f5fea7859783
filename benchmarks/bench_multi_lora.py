"""A batch whose sequences use different packs: one after the other, gathered in plain MLX, kernels.

The frozen products are left out: each implementation gets their outputs.

    python -m benchmarks.bench_multi_lora
"""

import functools
import sys
from collections.abc import Callable, Iterator

from mlx_packs.ops import dispatch
from mlx_packs.ops.grouped_lora import grouped_lora
from mlx_packs.ops.multi_lora import multi_lora
from mlx_packs.runtime import mx

from . import op_race
from .op_race import Contest

DEPTH, WIDTHS = 2560, (4096, 1024, 1024)  # q, k, v of Qwen3-4B
PACKS, SCALE = 4, 2.0


def implementations(x, outputs, a, b, scales, pack) -> dict[str, Callable]:
    """Calls without arguments, each giving the summed outputs."""
    of_sequence = pack.tolist()[: x.shape[0]]

    def one_by_one():
        each = [
            grouped_lora(
                x[i : i + 1],
                [y[i : i + 1] for y in outputs],
                [v[p] for v in a],
                [v[p] for v in b],
                [SCALE] * len(a),
            )
            for i, p in enumerate(of_sequence)
        ]
        return [mx.concatenate(parts) for parts in zip(*each, strict=True)]

    def ours(backend):
        def call():
            with dispatch.backend(backend):
                return multi_lora(x, outputs, a, b, scales, pack)

        return call

    results = {"a pack at a time": one_by_one, "mlx_packs plain MLX": ours("reference")}
    if name := op_race.kernel_backend():
        results[f"mlx_packs {name} kernel"] = ours(name)
    return results


def contests() -> Iterator[Contest]:
    """Decoding 1, 8 and 64 sequences, and 4 prompts of 128, over four packs."""
    dtype = op_race.activation_dtype()
    for rank in (16, 64):
        for sequences, rows in ((1, 1), (8, 1), (64, 1), (4, 128)):
            shape = f"qwen3_4b q/k/v, {sequences} x {rows} rows, rank {rank}"
            prepared = functools.partial(prepare, dtype, sequences, rows, rank)
            yield Contest(shape, str(dtype).rsplit(".", 1)[-1], prepared)


def prepare(dtype: mx.Dtype, sequences: int, rows: int, rank: int) -> op_race.Calls:
    """Seeded inputs, and the calls on them; every sequence has a pack."""
    x, *outputs = (
        mx.random.normal((sequences, rows, w), key=mx.random.key(i)).astype(dtype)
        for i, w in enumerate((DEPTH, *WIDTHS))
    )
    factors = mx.random.normal((PACKS, DEPTH, rank), key=mx.random.key(9)) * 0.02
    a = [factors.astype(dtype)] * len(WIDTHS)
    b = [mx.random.normal((PACKS, rank, w), key=mx.random.key(8)) * 0.1 for w in WIDTHS]
    b = [factors.astype(dtype) for factors in b]
    scales = [mx.full((8,), SCALE)] * len(WIDTHS)  # 8 or more: read in place
    pack = mx.array([i % PACKS for i in range(max(8, sequences))], dtype=mx.int32)
    mx.eval(x, outputs, a, b, scales, pack)
    return implementations(x, outputs, a, b, scales, pack)


if __name__ == "__main__":
    sys.exit(op_race.main("multi_lora", contests()))
