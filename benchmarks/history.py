"""Records of measurements, one line of JSON each: what ran, where, and how fast.

`benchmarks/history.jsonl` only ever grows; tables are made from it (`python -m benchmarks report`).
Records hold no paths and no host names.
"""

import argparse
import dataclasses
import json
import os
import platform
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from mlx_packs import runtime

from . import stock

HISTORY = Path(__file__).parent / "history.jsonl"
_CHECKOUT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Environment:
    """Where a run took place; ``date`` (UTC) is the same in all records of one run."""

    device: str
    os: str
    versions: dict[str, str]
    commit: str
    date: str

    @classmethod
    @cache
    def here(cls) -> "Environment":
        """Return the environment of this run; its date is the first call's."""
        return cls(
            device=f"{runtime.device_name()}, {os.cpu_count()} cores",
            os=f"{platform.system()} {platform.machine()}",
            versions=runtime.versions(),
            commit=_commit(),
            date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        )


def _commit() -> str:
    """The checkout's commit; ``+`` after it says that the working tree differs from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(_CHECKOUT), *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "--short=10", "HEAD") + (
            "+" if git("status", "--porcelain") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


@dataclass(frozen=True)
class Record:
    """One metric of one implementation at one task, spread over the samples of a run.

    p20, p50, p80: in ``unit``.   ratio: p50 as times the ``baseline`` implementation's speed in
    the same run, None where that says nothing.   peak_mb: MLX memory in 10^6 bytes that this
    implementation needs on its own.   blas, blas_threads: what multiplied fp32 matrices on a CPU.
    """

    task: str
    implementation: str
    shape: str
    dtype: str
    metric: str
    unit: str
    p20: float
    p50: float
    p80: float
    samples: int
    baseline: str
    ratio: float | None
    peak_mb: float | None
    blas: str
    blas_threads: int | None
    note: str
    device: str
    os: str
    versions: dict[str, str]
    commit: str
    date: str


def percentiles(samples: Sequence[float]) -> dict[str, float]:
    """p20, p50 and p80 of samples, to four significant digits."""
    values = np.percentile(samples, (20, 50, 80))
    return {f"p{p}": _rounded(v) for p, v in zip((20, 50, 80), values, strict=True)}


def record(
    here: Environment,
    task: str,
    implementation: str,
    shape: str,
    metric: str,
    unit: str,
    samples: Sequence[float],
    **fields: object,
) -> Record:
    """A record of samples taken ``here``; numbers to four significant digits.

    Args:
        fields: dtype, baseline, ratio, peak_mb and note of the record; ``stock_blas``: the BLAS
            was that of MLX's wheel.
    """
    stock_blas = fields.pop("stock_blas", False)
    for name in ("ratio", "peak_mb"):
        fields[name] = _rounded(fields.get(name))
    return Record(
        task=task,
        implementation=implementation,
        shape=shape,
        metric=metric,
        unit=unit,
        **percentiles(samples),
        samples=len(samples),
        blas=stock.REFERENCE_BLAS if stock_blas else stock.blas_name(),
        blas_threads=1 if stock_blas else runtime.BLAS.threads,
        **{"dtype": "float32", "baseline": "", "note": "", **fields},
        **dataclasses.asdict(here),
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def append(records: Iterable[Record], file: Path = HISTORY) -> None:
    """Add records to a history, one line each."""
    lines = [json.dumps(dataclasses.asdict(r), ensure_ascii=False) + "\n" for r in records]
    with file.open("a", encoding="utf-8") as f:
        f.write("".join(lines))


def add_option(parser: argparse.ArgumentParser) -> None:
    """``--history FILE``: where the records of a run go."""
    parser.add_argument(
        "--history",
        type=Path,
        default=HISTORY,
        metavar="FILE",
        help="where records are appended [benchmarks/history.jsonl]",
    )


def read(file: Path = HISTORY) -> list[Record]:
    """All records of a history, oldest first; none if there is no such file."""
    if not file.is_file():
        return []
    lines = file.read_text(encoding="utf-8").splitlines()
    return [Record(**json.loads(line)) for line in lines if line.strip()]
