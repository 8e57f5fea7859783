"""Rates that no table of chips has: the fixed time of a training step, and 4-bit products."""

from pathlib import Path

import mlx.nn as nn
from mlx_lm.models import qwen3

from ..chips import least_seconds
from ..packs.base import Base
from ..runtime import mx, on_cpu
from .implementations import SCALE, Adapters, Ours, Rows

ROWS = (64, 128, 256, 2048)  # of a product: inputs that are computed together
_ROWS_ON_CPU = (64, 256)
_CALLS = 4  # of a product, which do not wait for each other
_STEPS = 5
_BLOCKS = 36
_INPUTS = 8
# As small as a model of 36 blocks can be, so that its step is nearly all fixed time.
_TINY = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": _BLOCKS,
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 64,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}


def examine_rates() -> dict:
    """Return the ``step`` of next to nothing, and ``products``: 4-bit TFLOP/s, both directions."""
    if on_cpu():
        products = [_product(mx.float32, rows, 512) for rows in _ROWS_ON_CPU]
    else:
        dtypes = mx.float16, mx.bfloat16
        products = [_product(dtype, rows, 4096) for dtype in dtypes for rows in ROWS]
    return {"step": _fixed_time(), "products": products}


def _product(dtype: mx.Dtype, rows: int, size: int) -> dict:
    x = mx.random.normal((rows, size), key=mx.random.key(0)).astype(dtype)
    weight = mx.random.normal((size, size), key=mx.random.key(1)).astype(dtype)
    packed, scales, biases = mx.quantize(weight, group_size=64, bits=4)
    mx.eval(x, packed, scales, biases)

    def reached(transpose: bool) -> float:
        def product() -> mx.array:
            return mx.quantized_matmul(
                x, packed, scales, biases, transpose=transpose, group_size=64, bits=4
            )

        seconds = least_seconds(lambda: [product() for _ in range(_CALLS)])
        return 2 * _CALLS * rows * size * size / seconds / 1e12

    return {
        "dtype": str(dtype).rpartition(".")[2],
        "rows": rows,
        "tflops": reached(transpose=True),
        "gradient_tflops": reached(transpose=False),
    }


def _fixed_time() -> dict:
    def base() -> Base:
        model = qwen3.Model(qwen3.ModelArgs.from_dict(_TINY))
        nn.quantize(model, group_size=64, bits=4)
        model.freeze()
        return Base("a tiny model", Path("."), model, None, dict(_TINY), "")

    adapters = Adapters.random(base(), 8, SCALE, seed=0)
    ours = Ours(base, adapters, "quantized")
    batch = Rows.random(1, _INPUTS, _TINY["vocab_size"], seed=0).for_ours()
    ours.steps(batch, 2)  # compiles
    milliseconds = min(ours.steps(batch, _STEPS))
    return {"ms": milliseconds, "blocks": _BLOCKS, "inputs": _INPUTS}
