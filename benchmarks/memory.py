"""Memory of a training step: every implementation in its own process, on the same examples.

*Beyond the base* is MLX's peak minus the bytes of the base model: dense copies,
adapters and optimizer count. *Transient* is the part of it that a step allocates and frees.

    python -m benchmarks.memory --workload tiny_long
"""

import argparse
import gc
import json
import sys

from mlx_packs.bases.files import TINY
from mlx_packs.bench.implementations import SCALE, Adapters, Ours, TokenRows
from mlx_packs.bench.race import TOLERANCE, LossesDiffer, check_losses
from mlx_packs.config.choices import MATMUL_PATHS, POLICIES
from mlx_packs.errors import PackError
from mlx_packs.packs.base import Base
from mlx_packs.runtime import mx

from . import alone, history, patched, report, stock
from .history import Environment, Record, record
from .implementations import PATCHED, STOCK, conditions, mlx_lm, ours_name
from .workloads import WORKLOADS, activation_dtype, base_bytes, base_name, load

STEPS = 2


def measure(implementation: str, options: argparse.Namespace) -> dict:
    """Bytes that ``implementation`` needs for `STEPS` steps, and its losses; for a process of its own.

    Args:
        implementation: `STOCK`, `PATCHED`, or a matmul path of ours.
    """
    workload = WORKLOADS[options.workload]
    base = load(workload, options.model, options.seed)
    results = {"base": base_bytes(base), "dtype": activation_dtype(base)}
    batch_size, length = (
        options.batch_size or workload.batch_size,
        options.length or workload.length,
    )
    rows = TokenRows.random(batch_size, length, base.vocab_size, options.seed)
    adapters = Adapters.random(base, options.rank, SCALE, options.seed)

    def loaded() -> Base:
        return base

    losses: list[float] = []
    if implementation in (STOCK, PATCHED):
        trainer = mlx_lm(loaded, adapters)
        del adapters

        def batches():
            batch = rows.for_mlx_lm()
            batch = patched.with_targets(*batch) if implementation == PATCHED else batch
            results.update(_at_rest())
            for _ in range(STEPS):
                yield batch
                losses.append(trainer.loss)

        with conditions(trainer, implementation == PATCHED, reference_blas=False):
            trainer.train(batches())
    else:
        ours = Ours(loaded, adapters, implementation, options.recompute)
        del adapters
        batch = rows.for_ours()
        results.update(_at_rest())
        losses += [ours.step(batch)[1] for _ in range(STEPS)]
    return results | {
        "peak": mx.get_peak_memory(),
        # The kernel counts pages by processor: its peak can be a page below what it said at rest.
        "peak_rss": max(alone.peak_rss_bytes(), results["rss"]),
        "losses": losses,
        "targets": rows.targets,
        "stock_blas": not stock.blas_is_replaced(),
    }


def _at_rest() -> dict:
    """Memory in use before the first step; the peak counts from here."""
    gc.collect()  # what is freed later would hide as much of the peak
    mx.clear_cache()
    mx.reset_peak_memory()
    return {"resident": mx.get_active_memory(), "rss": alone.rss_bytes()}


def records(results: dict[str, dict], task: str, shape: str) -> list[Record]:
    """Megabytes of every implementation; ratios of bytes, ours over mlx-lm's stock."""
    here = Environment.here()
    new_records = []
    for name, bytes_of in results.items():
        for metric, of in _METRICS.items():
            value = of(bytes_of) / 1e6
            ratio = of(bytes_of) / of(results[STOCK]) if metric == "transient" else None
            new_records.append(
                record(
                    here,
                    task,
                    name,
                    shape,
                    metric,
                    "MB",
                    [value],
                    dtype=bytes_of["dtype"],
                    baseline=f"{STOCK}'s transient memory",
                    ratio=ratio,
                    stock_blas=bytes_of["stock_blas"],
                )
            )
    return new_records


_METRICS = {
    "transient": lambda b: b["peak"] - b["resident"],
    "beyond the base": lambda b: b["peak"] - b["base"],
    "process beyond loading": lambda b: b["peak_rss"] - b["rss"],
    "process": lambda b: b["peak_rss"],
}


def run(options: argparse.Namespace, arguments: list[str]) -> list[Record]:
    """Measure every implementation in turn. Raises: LossesDiffer, alone.Failed."""
    workload = WORKLOADS[options.workload]
    results = {}
    for implementation in (STOCK, PATCHED, *(options.matmul_path or workload.matmul_paths)):
        name = (
            implementation
            if implementation in (STOCK, PATCHED)
            else ours_name(implementation, options.recompute)
        )
        print(name, file=sys.stderr)
        blas = "off" if implementation == STOCK else None
        results[name] = alone.run("memory", [*arguments, "--alone", implementation], blas)
        first = results[STOCK]
        check_losses(first["losses"], results[name]["losses"], name, TOLERANCE[first["dtype"]])
    batch_size, length = (
        options.batch_size or workload.batch_size,
        options.length or workload.length,
    )
    shape = f"{batch_size} x {length}, {first['targets']} targets, rank {options.rank}"
    return records(results, f"memory {base_name(options.workload, options.model)}", shape)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        "python -m benchmarks.memory", description=__doc__.split("\n")[0], allow_abbrev=False
    )
    p.add_argument("--workload", choices=WORKLOADS, default="tiny", help="base and batch [tiny]")
    p.add_argument(
        "--model", default=TINY, help="another checkpoint for a workload on the tiny base"
    )
    p.add_argument(
        "--matmul-path",
        action="append",
        choices=MATMUL_PATHS,
        help="our matmul path, repeatable [the workload's]",
    )
    p.add_argument(
        "--recompute",
        choices=POLICIES,
        default="none",
        help="our activation checkpointing policy [%(default)s]",
    )
    p.add_argument("--batch-size", type=int, metavar="N", help="rows [the workload's]")
    p.add_argument("--length", type=int, metavar="N", help="tokens of a row [the workload's]")
    p.add_argument("--rank", type=int, default=8, metavar="N", help="of the adapters [8]")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--alone", metavar="IMPLEMENTATION", help=argparse.SUPPRESS)
    history.add_option(p)
    return p


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser().parse_args(arguments)
    try:
        if options.alone:
            print(json.dumps(measure(options.alone, options)))
            return 0
        new_records = run(options, arguments)
    except (LossesDiffer, PackError, alone.Failed) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1 if isinstance(error, LossesDiffer) else 2
    history.append(new_records, options.history)
    print(report.render(new_records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
