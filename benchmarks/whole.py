"""A whole model of random 4-bit weights, and real training steps on it: what it takes beside the
base's own bytes.

All seven projections of every block carry adapters, and blocks are recomputed in the backward. The
model runs in a process of its own, and no dense weight of it ever exists.

    python -m benchmarks.whole --model qwen3_4b --length 512
"""

import argparse
import json
import sys
import time

import numpy as np

from mlx_packs import runtime
from mlx_packs.bench.implementations import SCALE, Adapters, Ours, TokenRows
from mlx_packs.config.choices import MATMUL_PATHS, POLICIES
from mlx_packs.errors import PackError
from mlx_packs.runtime import mx

from . import alone, history, report
from .history import Environment, Record, record
from .implementations import ours_name
from .workloads import CONFIGS, activation_dtype, base_bytes, random_base


def measure(options: argparse.Namespace) -> dict:
    """Build the model, take the steps; bytes, seconds and losses. For a process of its own."""
    config = CONFIGS[options.model] | (
        {"num_hidden_layers": options.blocks} if options.blocks else {}
    )
    start = time.perf_counter()
    base = random_base(config, options.seed)
    results = {
        "dtype": activation_dtype(base),
        "base": base_bytes(base),
        "build_s": time.perf_counter() - start,
        "build_peak": mx.get_peak_memory(),
    }
    print(f"built in {results['build_s']:.0f} s: {results['base'] / 1e9:.2f} GB", file=sys.stderr)
    adapters = Adapters.random(base, options.rank, SCALE, options.seed)
    results["adapter_weights"] = sum(t.size for t in adapters.tensors.values())
    rows = TokenRows.random(options.batch_size, options.length, base.vocab_size, options.seed)
    ours = Ours(lambda: base, adapters, options.matmul_path, options.recompute)
    del adapters
    mx.clear_cache()
    mx.reset_peak_memory()
    results |= {
        "resident": mx.get_active_memory(),
        "targets": rows.targets,
        "step_s": [],
        "losses": [],
    }
    for step in range(options.steps):
        ms, loss = ours.step(rows.for_ours())
        print(
            f"step {step + 1} of {options.steps}: {ms / 1e3:.1f} s, loss {loss:.4f}",
            file=sys.stderr,
        )
        results["step_s"].append(ms / 1e3)
        results["losses"].append(loss)
    return results | {"peak": mx.get_peak_memory(), "peak_rss": alone.peak_rss_bytes()}


def records(results: dict, options: argparse.Namespace) -> list[Record]:
    """Gigabytes, seconds per step and tokens per second of one model."""
    here = Environment.here()
    blocks = options.blocks or CONFIGS[options.model]["num_hidden_layers"]
    shape = (
        f"{blocks} blocks, {options.batch_size} x {options.length}, {results['targets']} "
        f"targets, rank {options.rank}"
    )
    tokens = options.batch_size * options.length
    metrics = {
        ("base", "GB"): [results["base"] / 1e9],
        ("most while building", "GB"): [results["build_peak"] / 1e9],
        ("beyond the base", "GB"): [(results["peak"] - results["base"]) / 1e9],
        ("process", "GB"): [results["peak_rss"] / 1e9],
        ("step", "s"): results["step_s"],
        ("speed", "tokens/s"): [tokens / s for s in results["step_s"]],
    }
    name = ours_name(options.matmul_path, options.recompute)
    note = f"{results['adapter_weights'] / 1e6:.1f} M adapter weights with Adam."
    return [
        record(
            here,
            f"whole {options.model}",
            name,
            shape,
            metric,
            unit,
            samples,
            dtype=results["dtype"],
            note=note,
        )
        for (metric, unit), samples in metrics.items()
    ]


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        "python -m benchmarks.whole", description=__doc__.split("\n")[0], allow_abbrev=False
    )
    p.add_argument("--model", choices=CONFIGS, default="qwen3_4b", help="geometry [qwen3_4b]")
    p.add_argument("--blocks", type=int, metavar="N", help="only so many, for a trial [all]")
    p.add_argument(
        "--matmul-path",
        choices=MATMUL_PATHS,
        default="transient" if runtime.on_cpu() else "quantized",
        help="[transient on a CPU, else quantized]",
    )
    p.add_argument(
        "--recompute",
        choices=POLICIES,
        default="block",
        help="activation checkpointing policy [%(default)s]",
    )
    for flag, default in (("batch-size", 1), ("length", 512), ("rank", 16), ("steps", 2)):
        p.add_argument(f"--{flag}", type=int, default=default, metavar="N", help=f"[{default}]")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    history.add_option(p)
    return p


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser().parse_args(arguments)
    try:
        if options.alone:
            print(json.dumps(measure(options)))
            return 0
        results = alone.run("whole", [*arguments, "--alone"])
    except (PackError, alone.Failed) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    if not np.isfinite(results["losses"]).all():
        print(f"benchmarks: losses are not finite: {results['losses']}", file=sys.stderr)
        return 1
    new_records = records(results, options)
    history.append(new_records, options.history)
    print(report.render(new_records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
