"""Trainers in their own processes, which train alternately: A B C A B C.

The parent grants a number of steps, and waits for them; meanwhile the other processes wait for their
turns. So all trainers meet the same machine, and each has the peak memory of its own process.
"""

import contextlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .. import alone

_CHECKOUT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Turn:
    """Some steps of a trainer: their losses, their time, and the peak of its process so far."""

    losses: list[float]
    seconds: float
    cpu_seconds: float
    peak_bytes: int


class Turns:
    """A trainer's side: `start` before the first step, `step` after each, `finish` at the end.

    What libraries print goes to stderr, so that stdout has only the messages to the parent.

    peak_bytes: gives the most memory that the trainer has had.
    """

    def __init__(self, peak_bytes: Callable[[], int] = alone.peak_rss_bytes) -> None:
        self._peak_bytes = peak_bytes
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._losses: list[float] = []
        self._steps = 0

    def start(self) -> None:
        """Wait for the first turn."""
        self._send({"ready": True})
        self._wait()

    def step(self, loss: float) -> None:
        """Count a step that is done; at the end of a turn, report it and wait for the next one."""
        self._losses.append(loss)
        if len(self._losses) < self._steps:
            return

        turn = Turn(
            self._losses,
            time.perf_counter() - self._started,
            _cpu_seconds() - self._cpu_started,
            self._peak_bytes(),
        )
        self._send(asdict(turn))
        self._wait()

    def finish(self, result: dict[str, Any]) -> None:
        """Report the result of the whole run."""
        self._send(result)

    def _wait(self) -> None:
        line = sys.stdin.readline()
        if not line:
            sys.exit("the parent process has ended")
        self._steps, self._losses = int(line), []
        self._started, self._cpu_started = time.perf_counter(), _cpu_seconds()

    def _send(self, message: dict[str, Any]) -> None:
        print(json.dumps(message), file=self._out, flush=True)


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Trainer:
    """The parent's side of one trainer: ``python -m benchmarks.MODULE ARGUMENTS``."""

    def __init__(
        self, name: str, module: str, arguments: Sequence[str], threads: int | None = None
    ) -> None:
        self.name = name
        self.turns: list[Turn] = []
        environment = dict(os.environ)
        if threads is not None:
            environment["OPENBLAS_NUM_THREADS"] = str(threads)
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"benchmarks.{module}", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=_CHECKOUT,
        )

    def wait_until_ready(self) -> None:
        """Wait until it has loaded its model. Raises: alone.Failed."""
        self._read()

    def train(self, steps: int) -> None:
        """Let it take some steps. Raises: alone.Failed."""
        self._grant(steps)
        self.turns.append(Turn(**self._read()))

    def finish(self) -> dict[str, Any]:
        """Let it end after its last turn, and return its result. Raises: alone.Failed."""
        self._grant(0)
        result = self._read()
        self._process.wait()
        return result

    def stop(self) -> None:
        """End the process if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def _grant(self, steps: int) -> None:
        with contextlib.suppress(BrokenPipeError):  # `_read` says that the process has ended
            self._process.stdin.write(f"{steps}\n")
            self._process.stdin.flush()

    def _read(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise alone.Failed(f"the trainer {self.name} ended with exit code {code}")
        return json.loads(line)


def train_alternately(trainers: Sequence[Trainer], steps: int, turn: int) -> dict[str, dict]:
    """Let each trainer take ``steps`` steps, ``turn`` of them at a time; return their results.

    Raises: alone.Failed, after which no trainer runs.
    """
    try:
        for trainer in trainers:
            trainer.wait_until_ready()
        for first in range(0, steps, turn):
            for trainer in trainers:
                trainer.train(min(turn, steps - first))
            losses = ", ".join(f"{t.name} {t.turns[-1].losses[-1]:.3f}" for t in trainers)
            print(f"  step {min(first + turn, steps)} of {steps}: {losses}", file=sys.stderr)
        return {trainer.name: trainer.finish() for trainer in trainers}
    finally:
        for trainer in trainers:
            trainer.stop()
