"""Commands of `packs` as child processes of the studio, which itself loads no model.

`python -m mlx_packs.studio.commands` is `packs` that ends when its standard input does: the input
of a child is a pipe of the studio, which closes even if that is killed.
"""

import os
import runpy
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import PackError
from ..reading import Tail, json_objects, open_regular, tail_of

_END_S = 20.0
_POLL_S = 0.02


@dataclass(frozen=True)
class Outcome:
    """What came of a command so far.

    Attributes:
        state: working, done or failed; empty if none was started.
        text: the last line of its progress, or its error.
        report: the object that it printed.
        command: its command line in a terminal.
        error: why it failed.
    """

    state: str = ""
    text: str = ""
    report: Mapping[str, Any] = field(default_factory=dict)
    command: str = ""
    error: PackError | None = None


class Child:
    """A command that runs in the home; what it prints goes to files, which never fill up.

    The files have no name once it runs, so that a studio that is killed leaves none.
    A server is done when it is ready, and has failed when it has ended.
    """

    def __init__(self, home: Path, *arguments: str) -> None:
        self._arguments = arguments
        self._reading = threading.Lock()
        with tempfile.NamedTemporaryFile() as output, tempfile.NamedTemporaryFile() as progress:
            self._output = open_regular(Path(output.name))
            self._progress = open_regular(Path(progress.name))
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, *arguments, "--json"],
                cwd=home,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=progress,
            )

    @property
    def outcome(self) -> Outcome:
        exit_code = self._process.poll()  # asked first: it may end meanwhile
        with self._reading:
            report = next(json_objects([b"\n".join(tail_of(self._output).lines)]), {})
            lines = [line for line in tail_of(self._progress).lines if line.strip()]
        text = lines[-1].decode("utf-8", "replace").removeprefix("packs: ") if lines else "Starting"

        state = "working"
        error = None
        if isinstance(report.get("error"), dict):  # a number in reports of packs learn
            error = PackError(*(report["error"][name] for name in ("message", "code", "flag")))
        elif exit_code is not None and (not report or self._arguments[0] == "serve"):
            if exit_code < 0:
                text = f"The process was killed (signal {-exit_code})."
            error = PackError(f"packs {self._arguments[0]}: {text}", "unsupported")
        elif report:
            state = "done"
            text = ""  # of a server it is the token

        if error is not None:
            state = "failed"
            text = error.message
        return Outcome(state, text, report, shlex.join(["packs", *self._arguments]), error)

    def objects(self) -> Iterator[dict[str, Any]]:
        """Yield the objects among the lines of its progress, as they come, until it has ended."""
        seen = Tail([])
        is_running = True
        while is_running:
            is_running = self._process.poll() is None
            seen = tail_of(self._progress, seen.file, seen.end)
            yield from json_objects(seen.lines)
            if is_running:
                time.sleep(_POLL_S)

    def stop(self, patience: float = _END_S) -> None:
        """End the command, and wait for it; kill it after ``patience`` seconds."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        self._process.kill()
        with self._process, self._output, self._progress:
            pass  # closes them


def report_of(home: Path, *arguments: str) -> dict[str, Any]:
    """Return the JSON report of a command that runs in the home; raise its error."""
    *_, report = reports_of(home, *arguments)
    return report


def reports_of(home: Path, *arguments: str) -> Iterator[dict[str, Any]]:
    """Yield the objects that a command prints while it works, and then its report or error.

    The command is killed when the caller reads no further.

    Raises:
        PackError: the command failed: its own error, with code and flag.
    """
    child = Child(home, *arguments)
    try:
        yield from child.objects()
        outcome = child.outcome
    finally:
        child.stop(0)
    yield dict(outcome.report)
    if outcome.error:
        raise outcome.error


def end_with_studio() -> None:
    """End this process when its standard input ends, on which the studio sends nothing."""
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=end_with_studio, daemon=True).start()
    runpy.run_module(__package__.partition(".")[0], run_name="__main__")
