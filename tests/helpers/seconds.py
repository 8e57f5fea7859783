"""Seconds of the tests by folder: a run of pytest with MLX_PACKS_TEST_SECONDS=FILE, and their check.

python -m tests.helpers.seconds FILE          # the folders that take longer than their limit
python -m tests.helpers.seconds FILE --write  # make the seconds of that run the limits
"""

import json
import os
import sys
from collections import Counter
from pathlib import Path
from statistics import median

import pytest

from tests.helpers.budgets import FILE, limits

VARIABLE = "MLX_PACKS_TEST_SECONDS"
# Of one folder against the others: on another CPU the tests of tests/ops took 1.5 times their limit.
SLACK = 2.0
LEAST_SLACK_S = 15.0  # of small folders: a few other processes for a minute take as long
# A machine may be slower than the one of the limits by this factor, in all folders alike.
SLOWEST_MACHINE = 2.0


class Recorder:
    """A plug-in of pytest that writes the seconds of all tests by folder to a file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        parts = Path(report.fspath).parts[1:]
        self.seconds[parts[0] if len(parts) > 1 else "tests"] += report.duration

    def pytest_sessionfinish(self) -> None:
        seconds = {name: round(s, 1) for name, s in sorted(self.seconds.items())}
        self.file.write_text(json.dumps(seconds, indent=1), encoding="utf-8")


def record(config: pytest.Config) -> None:
    """Record if the variable names a file; processes of pytest-xdist report to the first one."""
    if (file := os.environ.get(VARIABLE)) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(Path(file)))


def slow_folders(seconds: dict[str, float], allowed: dict[str, float]) -> dict[str, str]:
    """The folders that take longer than their limit and its slack, or that have no limit.

    Without any limits none is slow: nothing was measured yet.
    """
    if not allowed:
        return {}

    pace = median(seconds[name] / allowed[name] for name in seconds if name in allowed)
    pace = min(max(pace, 1.0), SLOWEST_MACHINE)

    slow = {}
    for name, taken in seconds.items():
        limit = pace * allowed.get(name, 0.0)
        most = 0.0
        if limit:
            most = max(SLACK * limit, limit + LEAST_SLACK_S)
        if taken > most:
            slow[name] = f"{taken:.0f} s, at most {most:.0f} s"
    return slow


def main(file: str, *options: str) -> int:
    seconds = json.loads(Path(file).read_text(encoding="utf-8"))
    if "--write" in options:
        section = "".join(f"{name} = {value:g}\n" for name, value in seconds.items())
        text = FILE.read_text(encoding="utf-8")
        head, mark, rest = text.partition("\n[seconds]")
        comment, _, after = rest.partition("\n")
        _, next_mark, others = after.partition("\n[")
        FILE.write_text(f"{head}{mark}{comment}\n{section}{next_mark}{others}", encoding="utf-8")
        return 0

    slow = slow_folders(seconds, limits()["seconds"])
    for name, text in slow.items():
        print(f"tests/{name}: {text} (tests/budgets.toml)")
    return int(bool(slow))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
