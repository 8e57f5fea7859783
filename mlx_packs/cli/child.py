"""A child process whose messages reach the terminal at once, as if it had it to itself."""

import fcntl
import os
import pty
import select
import subprocess
import tempfile
import termios
import tty
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ..terminal import has_terminal, pass_on, terminal_size

_TICK_S = 1.0  # between two calls of ``watch``
_TAIL_BYTES = 1 << 14  # of its messages that are stored
_SHOW_CURSOR = b"\x1b[?25h\n"  # which the progress bar of a process that was killed has hidden


@dataclass(frozen=True)
class Ended:
    """The end of a child process.

    Attributes:
        code: its exit code; -n if signal n killed it.
        result: what it wrote to stdout.
        messages: the end of what it wrote to stderr.
    """

    code: int
    result: str
    messages: str


class Child:
    """A process in a session of its own, which only gets the signals that `send` passes to it.

    Its stderr is a terminal if that of this process is one; its stdout is collected.

    Args:
        command: the program and its arguments.
        variables: of its environment, beside those of this process.
    """

    def __init__(self, command: Sequence[str], variables: Mapping[str, str]) -> None:
        self._live = has_terminal()
        self._read, write = _terminal() if self._live else os.pipe()
        self._stdout = tempfile.TemporaryFile()
        try:
            self._process = subprocess.Popen(
                command,
                stdout=self._stdout,
                stderr=write,
                env={**os.environ, **variables},
                start_new_session=True,
            )
        finally:
            os.close(write)

        self._tail = b""
        self._is_open = True

    def send(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        self._process.send_signal(number)

    def wait(self, watch: Callable[[], None]) -> Ended:
        """Wait for the end, and call ``watch`` about once a second until then."""
        while self._process.poll() is None:
            self._pass_on(_TICK_S)
            watch()

        while self._pass_on(0):
            pass
        os.close(self._read)

        if self._live and self._process.returncode < 0:
            pass_on(_SHOW_CURSOR)

        with self._stdout as file:
            file.seek(0)
            result = file.read().decode(errors="replace")
        return Ended(self._process.returncode, result, self._tail.decode(errors="replace"))

    def _pass_on(self, seconds: float) -> bool:
        """Pass on what there is to read within a time; return whether there was anything."""
        if not self._is_open:  # nobody writes any more
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
            return False
        if not select.select([self._read], [], [], seconds)[0]:
            return False

        try:
            data = os.read(self._read, 1 << 16)
        except OSError:  # on Linux: nobody has the terminal open any more
            data = b""

        self._is_open = bool(data)
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        pass_on(data)
        return bool(data)


def _terminal() -> tuple[int, int]:
    """Return both ends of a new terminal of this one's size, which passes text on unchanged."""
    read, write = pty.openpty()
    tty.setraw(write)
    if size := terminal_size():
        fcntl.ioctl(write, termios.TIOCSWINSZ, size)
    return read, write
