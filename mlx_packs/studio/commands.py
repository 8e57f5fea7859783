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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import PackError
from ..reading import json_objects, open_regular, tail_of

_POLL_S = 0.02


@dataclass(frozen=True)
class Outcome:
    """What came of a command so far."""

    state: str = ""  # working, done or failed; empty if none was started
    text: str = ""  # the last line of its progress, or its error
    report: Mapping[str, Any] = field(default_factory=dict)  # that it printed
    command: str = ""  # its command line in a terminal
    error: PackError | None = None
    form: Mapping[str, str] = field(default_factory=dict)  # that started it
    progress: Sequence[bytes] = ()  # lines that it printed while it worked


class Child:
    """A command that runs in the home; what it prints goes to files, which never fill up.

    The files have no name once it runs, so that a studio that is killed leaves none.
    A server is done when it is ready, and has failed when it has ended.
    """

    def __init__(self, home: Path, *arguments: str, form: Mapping[str, str] | None = None) -> None:
        self._arguments = arguments
        self._form = form or {}
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
        command = shlex.join(["packs", *self._arguments])
        return Outcome(state, text, report, command, error, self._form, lines)

    def stop(self, patience: float = 20.0) -> None:
        """End the command, and wait for it; kill it after ``patience`` seconds."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        self._process.kill()
        with self._process, self._output, self._progress:
            pass  # closes them


def reports_of(home: Path, *arguments: str) -> Iterator[dict[str, Any]]:
    """Yield the objects that a command prints while it works, and then its report or error.

    The command is killed when the caller reads no further.

    Raises:
        PackError: the command failed: its own error, with code and flag.
    """
    child = Child(home, *arguments)
    outcome = Outcome("working")
    count = 0
    try:
        while outcome.state == "working":
            time.sleep(_POLL_S)
            outcome = child.outcome
            yield from json_objects(outcome.progress[count:])
            count = len(outcome.progress)
    finally:
        child.stop(0)
    yield dict(outcome.report)
    if outcome.error:
        raise outcome.error


def end_with_studio() -> None:
    os.read(0, 1)  # returns when the input ends, as the studio sends nothing
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=end_with_studio, daemon=True).start()
    runpy.run_module(__package__.partition(".")[0], run_name="__main__")
