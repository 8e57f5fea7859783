"""Every target of the training engine, measured from a clean checkout by one command.

Each benchmark runs in a process of its own; what it records goes to the history, and so do the
figures and what they must be. Speed and memory of a workload are those of one configuration of ours:
the one that meets most of its targets, and of these the fastest. Exit code 1 if a target is missed.

    python -m benchmarks targets
    python -m benchmarks targets --only tiny
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mlx_packs import runtime

from . import alone, history, report
from .history import Environment, Record, record
from .implementations import SAME_BLAS, STOCK

_CHECKOUT = Path(__file__).parent.parent
Records = dict[str, list[Record]]  # records by run


# Of training the top 2 of 8 blocks for 5 epochs with the other 6 computed once: by the products
# alone, the cache and all else for nothing (LOG.md has the arithmetic).
_PREFIX_BOUND = 1.78


@dataclass(frozen=True)
class Target:
    """One figure of one configuration of ours. ``of`` finds it in the records of the runs."""

    what: str
    of: Callable[[Records, str], float]
    unit: str = "x"
    at_least: float | None = None
    at_most: float | None = None

    def met(self, figure: float) -> bool:
        return figure >= self.at_least if self.at_least is not None else figure <= self.at_most


@dataclass(frozen=True)
class Goal:
    """A piece of workload, the runs that measure it (name to arguments), and its targets."""

    workload: str
    runs: dict[str, list[str]]
    targets: tuple[Target, ...]
    on_cpu: bool = True


def _value(records: list[Record], implementation: str, metric: str) -> float:
    return next(r.p50 for r in records if r.implementation == implementation and r.metric == metric)


def _speed_over(baseline: str) -> Callable[[Records, str], float]:
    """Return the ratio of supervised tokens per second to the baseline's."""

    def of(records_by_run: Records, ours: str) -> float:
        steps = records_by_run["train_step"]
        return _value(steps, ours, "speed") / _value(steps, baseline, "speed")

    return of


def _memory(metric: str) -> Callable[[Records, str], float]:
    """Bytes in a process of its own, as times those of mlx-lm stock."""

    def of(records_by_run: Records, ours: str) -> float:
        return _value(records_by_run["memory"], ours, metric) / _value(
            records_by_run["memory"], STOCK, metric
        )

    return of


def _run_speed(baseline: str) -> Callable[[Records, str], float]:
    def of(records_by_run: Records, ours: str) -> float:
        runs = records_by_run["train_run"]
        return _value(runs, baseline, "to the loss") / _value(runs, ours, "to the loss")

    return of


def _run_memory(records_by_run: Records, ours: str) -> float:
    peaks = {r.implementation: r.peak_mb for r in records_by_run["train_run"]}
    return peaks[ours] / peaks[STOCK]


def _figure(run: str, metric: str, implementation: str | None = None):
    """One number of one run."""

    def of(records_by_run: Records, ours: str) -> float:
        return _value(records_by_run[run], implementation or ours, metric)

    return of


def _step(workload: str, *more: str) -> dict[str, list[str]]:
    return {"train_step": ["--workload", workload, *more], "memory": ["--workload", workload]}


_SAME_BLAS = "speed, times mlx-lm with our BLAS"
_SPEED, _PEAK = "speed, times mlx-lm stock", "peak memory, times mlx-lm stock"
_TRANSIENT = "transient memory, times mlx-lm stock"
_BEYOND = "peak beyond the base"
GOALS = (
    Goal(
        "tiny base, 4 x 128, half supervised",
        _step("tiny"),
        (
            Target(_SPEED, _speed_over(STOCK), at_least=8),
            Target(_SAME_BLAS, _speed_over(SAME_BLAS), at_least=5),
            Target(_PEAK, _memory("beyond the base"), at_most=1),
        ),
    ),
    Goal(
        "tiny base, whole run to the same held-out loss",
        {"train_run": []},
        (
            Target(_SPEED, _run_speed(STOCK), at_least=15),
            Target(_PEAK, _run_memory, at_most=1),
        ),
    ),
    Goal(
        "one block of Qwen3-4B, 4 x 128",
        _step("qwen3_4b_block"),
        (
            Target(_SPEED, _speed_over(STOCK), at_least=40),
            Target(_TRANSIENT, _memory("transient"), at_most=0.6),
        ),
    ),
    Goal(
        "one block of Qwen3-4B, 4 x 128, roofline",
        {"profile": ["--workload", "qwen3_4b_block", "--matmul-path", "dense"]},
        (
            Target(
                "share of the measured matmul rate",
                _figure("profile", "share of the roofline", "whole step"),
                "%",
                at_least=60,
            ),
        ),
    ),
    Goal(
        "tiny base, 1 x 4096",
        _step("tiny_long", "--rounds", "1"),
        (
            Target(_SPEED, _speed_over(STOCK), at_least=10),
            Target(_TRANSIENT, _memory("transient"), at_most=0.25),
        ),
    ),
    Goal(
        "top quarter of 8 blocks, 5 epochs",
        {"prefix": ["--workload", "eight_blocks"]},
        (
            Target(
                "speed, times without the prefix cache",
                _figure("prefix", "times without"),
                at_least=0.9 * _PREFIX_BOUND,
            ),
        ),
    ),
    Goal(
        "Qwen3-4B whole, 1 x 512",
        {"whole": ["--model", "qwen3_4b"]},
        (Target(_BEYOND, _figure("whole", "beyond the base"), "GB", at_most=2.6),),
    ),
    Goal(
        "Llama-3-8B whole, 1 x 512",
        {"whole": ["--model", "llama3_8b"]},
        (Target(_BEYOND, _figure("whole", "beyond the base"), "GB", at_most=4.0),),
    ),
    Goal(
        "Qwen3-4B, 4 x 2048",
        _step("qwen3_4b"),
        (
            Target(_SPEED, _speed_over(STOCK), at_least=2),
            Target(_TRANSIENT, _memory("transient"), at_most=0.4),
        ),
        on_cpu=False,
    ),
    Goal(
        "Qwen3-4B whole, 1 x 2048",
        {"whole": ["--model", "qwen3_4b", "--length", "2048"]},
        (Target(_BEYOND, _figure("whole", "beyond the base"), "GB", at_most=1.3),),
        on_cpu=False,
    ),
    Goal(
        "Llama-3-8B whole, 1 x 2048",
        {"whole": ["--model", "llama3_8b", "--length", "2048"]},
        (Target(_BEYOND, _figure("whole", "beyond the base"), "GB", at_most=2.0),),
        on_cpu=False,
    ),
)


@dataclass(frozen=True)
class Result:
    """A figure of a configuration of ours."""

    workload: str
    target: Target
    ours: str
    figure: float


def run(name: str, arguments: list[str]) -> list[Record]:
    """The records of a benchmark in a process of its own. Raises: alone.Failed."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "history.jsonl"
        command = [sys.executable, "-m", "benchmarks", name, *arguments, "--history", str(file)]
        print(f"== {name} {' '.join(arguments)}", file=sys.stderr)
        code = subprocess.run(command, stdout=sys.stderr, cwd=_CHECKOUT).returncode
        # an implementation that failed has been reported, the others count
        if code and not file.exists():
            raise alone.Failed(f"benchmarks {name} {' '.join(arguments)}: exit code {code}")
        return history.read(file)


def evaluate(goal: Goal, records_by_run: Records) -> list[Result]:
    """The figures of the configuration of ours that meets most targets of a goal."""
    names = [{r.implementation for r in records} for records in records_by_run.values()]
    ours = sorted(n for n in set.intersection(*names) if n.startswith("mlx_packs")) or [
        "whole step"
    ]

    def results(name: str) -> list[Result]:
        return [Result(goal.workload, t, name, t.of(records_by_run, name)) for t in goal.targets]

    def rank(new_records: list[Result]) -> tuple[int, float]:
        first = new_records[0]
        better = first.figure if first.target.at_least is not None else -first.figure
        return sum(r.target.met(r.figure) for r in new_records), better

    return max((results(name) for name in ours), key=rank)


def records(results: list[Result]) -> list[Record]:
    """Figure and bound of every target."""
    here = Environment.here()
    new_records = []
    for r in results:
        name = f"{r.workload}: {r.target.what}"
        unit = r.target.unit
        bound = (
            ("at least", r.target.at_least)
            if r.target.at_least is not None
            else ("at most", r.target.at_most)
        )
        new_records.append(record(here, "targets", r.ours, name, "figure", unit, [r.figure]))
        new_records.append(record(here, "targets", r.ours, name, bound[0], unit, [bound[1]]))
    return new_records


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks targets", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="workloads whose name has this")
    history.add_option(parser)
    options = parser.parse_args(arguments)
    goals = [g for g in GOALS if options.only in g.workload and g.on_cpu == runtime.on_cpu()]
    if not goals:
        parser.error(f"--only {options.only}: no such workload on this device")
    results, new_records, failed = [], [], False
    for goal in goals:
        try:
            records_by_run = {name: run(name, arguments) for name, arguments in goal.runs.items()}
        except alone.Failed as error:
            print(f"benchmarks: {error}", file=sys.stderr)
            failed = True
            continue
        history.append(
            (r for records_of in records_by_run.values() for r in records_of), options.history
        )
        results += evaluate(goal, records_by_run)
        new_records += records(results[-len(goal.targets) :])
        history.append(new_records[-2 * len(goal.targets) :], options.history)
    print(report.targets(new_records))
    if failed:
        return 2
    return 0 if all(r.target.met(r.figure) for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
