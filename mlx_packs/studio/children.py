"""Commands of `packs` that work while the studio does other things, and end with it.

`python -m mlx_packs.studio.children` is `packs` that ends when its standard input does: the input
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
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from ..reading import parse_json

_BYTES = 1 << 20  # of output that is read
_END_S = 20.0


@dataclass(frozen=True)
class Outcome:
    """What came of a command so far.

    Attributes:
        state: working, done or failed; empty if none was started.
        text: the last line of its progress, or its error.
        report: the object that it printed.
        command: its command line in a terminal.
    """

    state: str = ""
    text: str = ""
    report: Mapping[str, Any] = field(default_factory=dict)
    command: str = ""


class Child:
    """A command that runs in the home; what it prints goes to files, which never fill up.

    A server is done when it is ready, and has failed when it has ended.
    """

    def __init__(self, home: Path, *arguments: str) -> None:
        self._arguments = arguments
        self._output: IO[bytes] = tempfile.TemporaryFile()
        self._errors: IO[bytes] = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, *arguments, "--json"],
            cwd=home,
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=self._errors,
        )

    @property
    def outcome(self) -> Outcome:
        is_running = self._process.poll() is None  # asked first: it may end meanwhile
        report: dict[str, Any] = {}
        with suppress(ValueError):
            report = parse_json(_text(self._output))
        lines = [line for line in _text(self._errors).splitlines() if line.strip()]
        text = lines[-1].removeprefix("packs: ") if lines else "Starting"

        state = "done" if report else "working"
        if not is_running and (not report or self._arguments[0] == "serve"):
            state = "failed"
        if isinstance(report.get("error"), dict):
            state = "failed"
            text = report["error"]["message"]
        elif state == "failed" and self._process.returncode < 0:
            text = f"The process was killed (signal {-self._process.returncode})."
        if state == "done":
            text = ""  # of a server it is the token
        return Outcome(state, text, report, shlex.join(["packs", *self._arguments]))

    def stop(self) -> None:
        """End the command, and wait for it."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self._process.kill()
        with self._process, self._output, self._errors:
            pass  # closes them


def _text(file: IO[bytes]) -> str:
    # the child writes at the position of the file, which must stay
    start = max(0, os.fstat(file.fileno()).st_size - _BYTES)
    return os.pread(file.fileno(), _BYTES, start).decode("utf-8", "replace")


def end_with_studio() -> None:
    """End this process when its standard input ends, on which the studio sends nothing."""
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=end_with_studio, daemon=True).start()
    runpy.run_module(__package__.partition(".")[0], run_name="__main__")
