"""A long run on the tiny base, and whether its memory and its steps stay as they are.

The run is `train_pack` itself, with its reports and checkpoints. Every few batches a display that
shows nothing notes resident bytes, MLX's memory and the time of the batches since.

    python -m benchmarks.steady
"""

import argparse
import csv
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from mlx_packs.bases.files import TINY
from mlx_packs.config.schema import LoRAConfig, TrainConfig
from mlx_packs.display import QUIET, Display, Task
from mlx_packs.errors import PackError
from mlx_packs.runtime import mx
from mlx_packs.training.run import train_pack

from . import alone, figures, history, report
from .history import Environment, Record, record
from .workloads import PASSAGES

_START = 0.1  # share of the run before memory counts as settled


@dataclass(frozen=True)
class Sample:
    """Megabytes after a batch, the most in MLX since the sample before, milliseconds a batch."""

    batch: int
    rss_mb: float
    active_mb: float
    cache_mb: float
    peak_mb: float
    step_ms: float


class Samples(Display):
    """Shows nothing; notes a `Sample` every so many batches of the training loop."""

    def __init__(self, every: int):
        super().__init__(QUIET)
        self.every = every
        self.samples: list[Sample] = []
        self._since = 0.0

    @contextmanager
    def task(self, label: str, total: int, *args: Any, **options: Any) -> Iterator[Task]:
        with super().task(label, total, *args, **options) as task:
            if label == "train":
                self._since = time.perf_counter()
                advance = task.advance

                def advance_and_sample(text: str | None = None) -> None:
                    advance(text)
                    if task.done % self.every == 0:
                        self._take(task.done)

                task.advance = advance_and_sample
            yield task

    def _take(self, batch: int) -> None:
        now = time.perf_counter()
        sizes = (
            alone.rss_bytes(),
            mx.get_active_memory(),
            mx.get_cache_memory(),
            mx.get_peak_memory(),
        )
        megabytes = [size / 1e6 for size in sizes]
        self.samples.append(Sample(batch, *megabytes, 1e3 * (now - self._since) / self.every))
        mx.reset_peak_memory()
        self._since = time.perf_counter()


def drift(samples: list[Sample]) -> dict[str, float]:
    """MB that each memory grew from a tenth of the run to its end: medians of a tenth each."""
    tenth = max(1, int(len(samples) * _START))
    early, late = samples[tenth : 2 * tenth] or samples[:1], samples[-tenth:]
    return {
        name: float(np.median([asdict(s)[name] for s in late]))
        - float(np.median([asdict(s)[name] for s in early]))
        for name in ("rss_mb", "active_mb", "cache_mb", "peak_mb")
    }


def write_csv(samples: list[Sample], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="", encoding="utf-8") as f:
        writer = csv.writer(f)
        writer.writerow([field.name for field in fields(Sample)])
        writer.writerows([f"{value:.6g}" for value in astuple(sample)] for sample in samples)


def plot(samples: list[Sample], file: Path, title: str) -> None:
    """Memory over batches above, milliseconds a batch below."""
    with figures.saved(file, rows=2) as (memory, time_axis):
        batches = [s.batch for s in samples]
        shown = {
            "rss_mb": "process",
            "peak_mb": "MLX, most",
            "active_mb": "MLX, between steps",
            "cache_mb": "MLX's cache",
        }
        for name, label in shown.items():
            memory.plot(batches, [asdict(s)[name] for s in samples], label=label)
        memory.set(title=title, ylabel="MB", ylim=(0, None))
        memory.legend(loc="center right")
        time_axis.plot(batches, [s.step_ms for s in samples], color="0.3")
        time_axis.set(xlabel="batch", ylabel="ms a batch", ylim=(0, None))


def run(options: argparse.Namespace) -> list[Record]:
    """Train, plot, record."""
    display = Samples(options.every)
    with tempfile.TemporaryDirectory() as folder:
        trained = train_pack(
            TINY,
            str(PASSAGES),
            LoRAConfig(rank=8),
            TrainConfig(
                iters=options.iters,
                batch_size=options.batch_size,
                max_seq_length=options.length,
                learning_rate=1e-4,
                val_batches=2,
                test_batches=2,
            ),
            Path(folder) / "pack",
            progress=display,
        )
    samples = display.samples
    shape = f"{options.iters} batches of {options.batch_size} x {options.length}"
    write_csv(samples, options.out.with_suffix(".csv"))
    plot(samples, options.out.with_suffix(".png"), f"Tiny base, {shape}")
    results = drift(samples)
    here = Environment.here()
    shapes, traces = trained.report["batch_shapes"], trained.report["traces"]
    start = f"from batch {samples[max(0, int(len(samples) * _START) - 1)].batch} on"
    note = (
        f"{shapes} shapes of batches, {traces} compiled traces. Growth is between the medians "
        "of the second and of the last tenth of the run."
    )
    path = f"mlx_packs {trained.report['matmul_path']}"
    new_records = [
        record(
            here, "steady tiny", path, shape, "step", "ms", [s.step_ms for s in samples], note=note
        ),
        record(
            here,
            "steady tiny",
            path,
            shape,
            "most in MLX",
            "MB",
            [s.peak_mb for s in samples],
            note=note,
        ),
    ]
    names = {
        "rss_mb": "process",
        "peak_mb": "most in MLX",
        "active_mb": "kept in MLX",
        "cache_mb": "MLX's cache",
    }
    new_records += [
        record(
            here,
            "steady tiny",
            path,
            shape,
            f"growth {start}: {label}",
            "MB",
            [results[name]],
            note=note,
        )
        for name, label in names.items()
    ]
    return new_records


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.steady", description=__doc__.split("\n")[0]
    )
    for flag, default in (("iters", 2000), ("every", 20), ("batch-size", 1), ("length", 64)):
        parser.add_argument(
            f"--{flag}", type=int, default=default, metavar="N", help=f"[{default}]"
        )
    parser.add_argument(
        "--out",
        type=Path,
        default=figures.IMAGES / "steady",
        metavar="FILE",
        help="where .csv and .png go [benchmarks/images/steady]",
    )
    history.add_option(parser)
    options = parser.parse_args(arguments)
    if options.iters < options.every:
        parser.error("--every: must not be more than --iters")
    try:
        new_records = run(options)
    except PackError as error:
        print(f"benchmarks: {error.message}", file=sys.stderr)
        return 2
    history.append(new_records, options.history)
    print(report.render(new_records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
