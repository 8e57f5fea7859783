"""Implementations of one op on the same inputs, in turns, in one process.

Their results must agree before a time is printed. A turn repeats the call until it takes long
enough to be timed; turns go A B C C B A.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mlx_packs import runtime
from mlx_packs.ops import _backend, dispatch
from mlx_packs.runtime import mx

from . import history, report, stock
from .history import Environment, Record, percentiles

_TURN_S = 0.02
_TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}  # of the largest number


@dataclass(frozen=True)
class Contest:
    """One op at one shape. ``prepare`` makes its inputs and gives, by name, calls on them."""

    shape: str
    dtype: str
    prepare: Callable[[], "Calls"]


Calls = dict[str, Callable[[], Sequence[mx.array]]]  # the first is the baseline


def check(contest: Contest, calls: Calls) -> None:
    """Raises SystemExit if an implementation's results differ from the first's."""
    first, *others = calls.items()
    expected = [v.astype(mx.float32) for v in first[1]()]
    for name, call in others:
        for want, got in zip(expected, call(), strict=True):
            error = (mx.abs(got.astype(mx.float32) - want).max() / mx.abs(want).max()).item()
            if not error <= _TOLERANCE[contest.dtype]:
                sys.exit(f"{contest.shape}: {name} differs from {first[0]} by {error:.1e}")


def race(calls: Calls, rounds: int) -> dict[str, list[float]]:
    """Microseconds of a call, one number for each turn."""
    repeats = {name: _repeats(call) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for turn in range(2 * rounds):
        for name in names if turn % 2 == 0 else names[::-1]:
            call = calls[name]
            mx.eval(call())
            start = time.perf_counter()
            for _ in range(repeats[name]):
                mx.eval(call())
            samples[name].append(1e6 * (time.perf_counter() - start) / repeats[name])
    return samples


def _repeats(call: Callable[[], Sequence[mx.array]]) -> int:
    mx.eval(call())
    start = time.perf_counter()
    mx.eval(call())
    return max(1, round(_TURN_S / (time.perf_counter() - start)))


def records(task: str, contest: Contest, times: dict[str, list[float]]) -> list[Record]:
    """Microseconds of every implementation; ratio is how many times the baseline's speed."""
    here = dataclasses.asdict(Environment.here())
    baseline = next(iter(times))
    base = percentiles(times[baseline])["p50"]
    return [
        Record(
            task=task,
            implementation=name,
            shape=contest.shape,
            dtype=contest.dtype,
            metric="call",
            unit="us",
            **percentiles(samples),
            samples=len(samples),
            baseline=baseline,
            ratio=float(f"{base / percentiles(samples)['p50']:.4g}"),
            peak_mb=None,
            blas=stock.blas_name(),
            blas_threads=runtime.BLAS.threads,
            note="",
            **here,
        )
        for name, samples in times.items()
    ]


def parser(name: str) -> argparse.ArgumentParser:
    """The options of a race of ops."""
    p = argparse.ArgumentParser(f"python -m benchmarks.{name}", allow_abbrev=False)
    p.add_argument("--rounds", type=int, default=5, help="A B B A, so many times [5]")
    p.add_argument("--only", default="", metavar="TEXT", help="shapes that contain TEXT")
    history.add_option(p)
    return p


def main(task: str, contests: Iterable[Contest], arguments: list[str] | None = None) -> int:
    """Race every contest, print the table, append to the history."""
    options = parser(f"bench_{task}").parse_args(arguments)
    new_records, date = [], None
    for contest in contests:
        if options.only not in contest.shape:
            continue
        print(contest.shape, file=sys.stderr)
        calls = contest.prepare()
        check(contest, calls)
        for record in records(f"op {task}", contest, race(calls, options.rounds)):
            date = date or record.date
            new_records.append(dataclasses.replace(record, date=date))  # one run, one date
    if not new_records:
        sys.exit(f"--only {options.only}: no shape contains that")
    if fallbacks := _backend.record()["fallbacks"]:
        sys.exit(f"kernels failed here, so these are no times of theirs: {fallbacks}")
    history.append(new_records, options.history)
    print(report.render(new_records))
    return 0


def kernel_backend() -> str | None:
    """The backend of this machine whose kernels can be timed, or None."""
    name = dispatch.detect()
    return None if name == "reference" else name


def activation_dtype() -> mx.Dtype:
    """bfloat16 on a GPU; float32 on a CPU, where half precision is far slower."""
    return mx.float32 if runtime.on_cpu() else mx.bfloat16
