"""Loading a base and its tokenizer: `load_base` against `mlx_lm.load`, alternating.

Every load is in a process of its own; imports are not in its time.

    python -m benchmarks.load --model tiny
"""

import argparse
import json
import sys
import time
from pathlib import Path

import mlx_lm

from mlx_packs.bases.files import TINY, resolve_checkpoint
from mlx_packs.errors import PackError
from mlx_packs.packs.base import load_base
from mlx_packs.runtime import mx

from . import alone, history, report
from .history import Environment, Record, percentiles, record

BASELINE, OURS = "mlx_lm.load", "mlx_packs load_base"


def measure(implementation: str, model: str) -> dict:
    """Seconds and bytes of one load; for a process of its own."""
    path = resolve_checkpoint(model)
    before, start = alone.rss_bytes(), time.perf_counter()
    loaded = load_base(path).model if implementation == OURS else mlx_lm.load(str(path))[0]
    mx.eval(loaded.parameters())
    seconds = time.perf_counter() - start
    return {
        "s": seconds,
        "peak": mx.get_peak_memory(),
        "active": mx.get_active_memory(),
        "process": alone.peak_rss_bytes() - before,
    }


def race(model: str, rounds: int) -> dict[str, list[dict]]:
    """What each implementation took, forth and back ``rounds`` times. Raises: alone.Failed."""
    results: dict[str, list[dict]] = {BASELINE: [], OURS: []}
    for turn in range(2 * rounds):
        for implementation in list(results)[:: 1 if turn % 2 == 0 else -1]:
            results[implementation].append(
                alone.run("load", ["--model", model, "--alone", implementation])
            )
    return results


def records(results: dict[str, list[dict]], model: str) -> list[Record]:
    """Seconds and megabytes of both."""
    here = Environment.here()
    base = percentiles([run["s"] for run in results[BASELINE]])["p50"]
    new_records = []
    for implementation, runs in results.items():
        seconds = [run["s"] for run in runs]
        about = {"baseline": BASELINE, "note": "On a CPU ours takes scales and norms to float32."}
        name, shape = f"load {Path(model).name}", f"{runs[0]['active'] / 1e6:.1f} MB"
        new_records.append(
            record(
                here,
                name,
                implementation,
                shape,
                "load",
                "s",
                seconds,
                ratio=base / percentiles(seconds)["p50"],
                **about,
            )
        )
        for metric, key in (("most in MLX", "peak"), ("process", "process")):
            samples = [run[key] / 1e6 for run in runs]
            new_records.append(
                record(here, name, implementation, shape, metric, "MB", samples, **about)
            )
    return new_records


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.load", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--model", default=TINY, help="checkpoint folder [tiny]")
    parser.add_argument("--rounds", type=int, default=5, help="forth and back [5]")
    parser.add_argument("--alone", choices=(BASELINE, OURS), help=argparse.SUPPRESS)
    history.add_option(parser)
    options = parser.parse_args(arguments)
    try:
        if options.alone:
            print(json.dumps(measure(options.alone, options.model)))
            return 0
        new_records = records(race(options.model, options.rounds), options.model)
    except (PackError, alone.Failed) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    history.append(new_records, options.history)
    print(report.render(new_records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
