"""What 4-bit and 8-bit formats cost: error of the weights, and perplexity of the tiny base.

The tiny base was trained through affine 4-bit weights in groups of 64 and is stored so, which
favours that format. So it is also measured *rescaled*: columns of a weight times random factors in
[0.5, 2], and what feeds them divided by the same. The function is the same (its perplexity shows
it), but the weights lie on no grid.

    python -m benchmarks.quantization_error
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import mlx.nn as nn
import numpy as np

from mlx_packs import load_base, runtime
from mlx_packs.config.schema import DataConfig
from mlx_packs.data import rows as rows_of
from mlx_packs.data.batches import evaluation_batches
from mlx_packs.data.encoding import EncodingOptions, encode
from mlx_packs.evaluation.perplexity import PerplexityScore, Scorer
from mlx_packs.nn.quantized import dense_module, quantized_modules
from mlx_packs.nn.surgery import replace_modules
from mlx_packs.objectives.causal_lm import split_head
from mlx_packs.ops import nf4
from mlx_packs.packs.base import Base
from mlx_packs.runtime import mx

from . import history, report, stock
from .history import Environment, Record
from .workloads import PASSAGES

Format = Callable[[mx.array], tuple[mx.array, int]]  # a weight to itself dequantized, and its bytes


def _nf4(double_quant: bool) -> Format:
    def to_nf4(w: mx.array) -> tuple[mx.array, int]:
        packed = nf4.quantize(w, 64, double_quant)
        return nf4.dequantize(packed, mx.float32), packed.nbytes

    return to_nf4


def _mlx(group_size: int, bits: int, mode: str) -> Format:
    how = {"group_size": group_size, "bits": bits, "mode": mode}

    def to_mlx(w: mx.array) -> tuple[mx.array, int]:
        parts = mx.quantize(
            w.astype(mx.bfloat16), **how
        )  # scales in bf16, as checkpoints have them
        dense = mx.dequantize(*parts, **how).astype(mx.float32)
        return dense, sum(part.nbytes for part in parts)

    return to_mlx


FORMATS: dict[str, Format] = {
    "NF4, double-quantized": _nf4(True),
    "NF4": _nf4(False),
    "affine 4-bit g32": _mlx(32, 4, "affine"),
    "affine 4-bit g64": _mlx(64, 4, "affine"),
    "affine 4-bit g128": _mlx(128, 4, "affine"),
    "mxfp4": _mlx(32, 4, "mxfp4"),
    "nvfp4": _mlx(16, 4, "nvfp4"),
    "affine 8-bit g64": _mlx(64, 8, "affine"),
    "mxfp8": _mlx(32, 8, "mxfp8"),
}


def dense_base() -> Base:
    """The tiny base with every weight dense in float32."""
    base = load_base("tiny")
    dense = [(path, dense_module(m)) for path, m in quantized_modules(base.model)]
    replace_modules(base.model, dense)
    return base


def rescale(base: Base, seed: int = 0) -> None:
    """Move factors between the weights of each block; the model's function stays."""
    keys = iter(mx.random.split(mx.random.key(seed), 4 * len(base.model.layers)))

    def factors(width: int) -> mx.array:
        return mx.power(2.0, mx.random.uniform(-1, 1, (width,), key=next(keys)))

    for block in base.model.layers:
        attention, mlp = block.self_attn, block.mlp
        pairs = (
            (block.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (block.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        )
        for norm, readers in pairs:
            c = factors(norm.weight.size)
            norm.weight = norm.weight / c
            for linear in readers:
                linear.weight = linear.weight * c
        c = factors(mlp.up_proj.weight.shape[0])
        mlp.up_proj.weight = mlp.up_proj.weight / c[:, None]
        mlp.down_proj.weight = mlp.down_proj.weight * c
        c = factors(attention.v_proj.weight.shape[0])  # a KV head serves several query heads
        repeats = attention.n_heads // attention.n_kv_heads
        of_heads = mx.repeat(c.reshape(attention.n_kv_heads, -1), repeats, axis=0).flatten()
        attention.v_proj.weight = attention.v_proj.weight / c[:, None]
        attention.o_proj.weight = attention.o_proj.weight * of_heads


def perplexity(base: Base, rows: int) -> PerplexityScore:
    """Held-out perplexity of the passages' answers."""
    columns = DataConfig(data=str(PASSAGES))
    test = rows_of.load_rows(columns).rows["test"][:rows]
    options = EncodingOptions(max_seq_length=256, vocab_size=base.vocab_size)
    examples = encode(test, base.tokenizer, columns, options)
    scorer = Scorer(base.model, split_head(base.model))
    return scorer.score(evaluation_batches(examples, 4, 256))


def linears(base: Base) -> dict[str, nn.Linear]:
    """The projections inside the blocks: what every format quantizes here."""
    named = base.model.named_modules()
    return {path: m for path, m in named if isinstance(m, nn.Linear) and "layers." in path}


def measure(base: Base, rows: int) -> dict[str, tuple[float, float, PerplexityScore]]:
    """By format: bits per weight, relative RMSE over all weights, and the score."""
    dense = {path: m.weight for path, m in linears(base).items()}
    total = sum(w.size for w in dense.values())
    power = sum(w.square().sum().item() for w in dense.values())
    results = {"float32": (32.0, 0.0, perplexity(base, rows))}
    for name, quantize in FORMATS.items():
        error, size = 0.0, 0
        for path, module in linears(base).items():
            module.weight, nbytes = quantize(dense[path])
            error += (module.weight - dense[path]).square().sum().item()
            size += nbytes
        results[name] = (8 * size / total, float(np.sqrt(error / power)), perplexity(base, rows))
        for path, module in linears(base).items():
            module.weight = dense[path]
    return results


def normal_rmse() -> dict[str, float]:
    """Relative RMSE of each format on a matrix of normal numbers."""
    w = mx.random.normal((1024, 2048), key=mx.random.key(0))
    return {
        name: ((quantize(w)[0] - w).square().mean() / w.square().mean()).sqrt().item()
        for name, quantize in FORMATS.items()
    }


def records(rows: int) -> list[Record]:
    """Bits, RMSE and perplexity of every format, on the base as it is and rescaled."""
    here = dataclasses.asdict(Environment.here())
    as_it_is, moved = dense_base(), dense_base()
    rescale(moved)
    implementations = {"tiny": measure(as_it_is, rows), "tiny, rescaled": measure(moved, rows)}
    normal = normal_rmse()
    new_records = []

    def add(name: str, metric: str, unit: str, value: float, se: float = 0.0) -> None:
        spread = {"p20": value - se, "p50": value, "p80": value + se}
        new_records.append(
            Record(
                task="quantization error",
                implementation=name,
                shape=f"{rows} held-out rows",
                dtype="float32",
                metric=metric,
                unit=unit,
                **{key: float(f"{v:.5g}") for key, v in spread.items()},
                samples=rows,
                baseline="float32",
                ratio=None,
                peak_mb=None,
                blas=stock.blas_name(),
                blas_threads=runtime.BLAS.threads,
                note="Perplexity: value (one standard error down and up). RMSE: relative.",
                **here,
            )
        )

    for name, (bits, _, _) in implementations["tiny"].items():
        add(name, "size", "bits a weight", bits)
        if name in normal:
            add(name, "RMSE, normal numbers", "of the weights", normal[name])
        for implementation, results in implementations.items():
            _, rmse, scored = results[name]
            add(name, f"RMSE, {implementation}", "of the weights", rmse)
            add(name, f"PPL, {implementation}", "", scored.ppl, scored.ppl_se)
    return new_records


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.quantization_error", allow_abbrev=False)
    parser.add_argument("--rows", type=int, default=200, help="held-out rows [200]")
    parser.add_argument(
        "--history",
        type=Path,
        default=history.HISTORY,
        metavar="FILE",
        help="where records go [benchmarks/history.jsonl]",
    )
    options = parser.parse_args(arguments)
    new_records = records(options.rows)
    history.append(new_records, options.history)
    print(report.render(new_records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
