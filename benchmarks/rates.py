"""Rates that no table of chips has: the fixed time of a training step, and 4-bit products.

python -m benchmarks.rates    # on a Mac; `python -m benchmarks graph --step-ms` takes the time
"""

import itertools
from pathlib import Path

import mlx.nn as nn
from mlx_lm.models import qwen3

from mlx_packs.bases.weight_formats import named_format
from mlx_packs.bench.implementations import SCALE, Adapters, Ours, TokenRows
from mlx_packs.chips import least_seconds
from mlx_packs.nn.frozen_weight import Product, frozen_weight
from mlx_packs.packs.base import Base
from mlx_packs.runtime import mx, on_cpu

ROWS = (64, 128, 256, 2048)  # of a product: inputs that are computed together
_ROWS_ON_CPU = (64, 256)
_FORMATS = ("affine4", "mxfp4", "nvfp4")  # whose kernels differ on M5
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
    dtypes = (mx.float16, mx.bfloat16)
    counts = ROWS
    size = 4096
    if on_cpu():
        dtypes = (mx.float32,)
        counts = _ROWS_ON_CPU
        size = 512

    products = [
        _product(name, dtype, rows, size)
        for name, dtype, rows in itertools.product(_FORMATS, dtypes, counts)
    ]
    return {"step": _fixed_time(), "products": products}


def _product(name: str, dtype: mx.Dtype, rows: int, size: int) -> dict:
    x = mx.random.normal((rows, size), key=mx.random.key(0)).astype(dtype)
    weight = mx.random.normal((size, size), key=mx.random.key(1)).astype(dtype)
    linear = nn.Linear(size, size, bias=False)
    linear.weight = weight
    module = linear.to_quantized(**named_format(name).to_config())
    forward, backward = frozen_weight(module).slice_products(0, size)
    mx.eval(x, module.parameters())

    def reached(product: Product) -> float:
        seconds = least_seconds(lambda: [product(x) for _ in range(_CALLS)])
        return 2 * _CALLS * rows * size * size / seconds / 1e12

    return {
        "format": name,
        "dtype": str(dtype).rpartition(".")[2],
        "rows": rows,
        "tflops": reached(forward),
        "gradient_tflops": reached(backward),
    }


def _fixed_time() -> dict:
    def base() -> Base:
        model = qwen3.Model(qwen3.ModelArgs.from_dict(_TINY))
        nn.quantize(model, group_size=64, bits=4)
        model.freeze()
        return Base("a tiny model", Path("."), model, None, dict(_TINY), "")

    adapters = Adapters.random(base(), 8, SCALE, seed=0)
    ours = Ours(base, adapters, "quantized")
    batch = TokenRows.random(1, _INPUTS, _TINY["vocab_size"], seed=0).for_ours()
    ours.steps(batch, 2)  # compiles
    return {"ms": min(ours.steps(batch, _STEPS)), "blocks": _BLOCKS, "inputs": _INPUTS}


def main() -> None:
    rates = examine_rates()
    step = rates["step"]
    print(f"step    {step['ms']:,.1f} ms with {step['blocks']} blocks of next to nothing")
    print("TFLOP/s of a product and of its gradient:")
    for p in rates["products"]:
        name = f"{p['format']:<8}{p['dtype']}, {p['rows']:,} rows"
        print(f"{name}: {p['tflops']:.3g} and {p['gradient_tflops']:.3g}")


if __name__ == "__main__":
    main()
