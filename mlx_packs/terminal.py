"""Safe text for terminals: every line of the program, and every message of a library, goes here.

Data, templates, manifests, names of files and generated text come from strangers, and a terminal
obeys what is in them: escape sequences move the cursor, rename the window, write the clipboard or
answer as if the user had typed, and bidi controls show a line in another order than it has. Each
such character is replaced by ``?``, always and not on terminals alone: what a file or a pipe
receives is viewed later, with ``cat``, ``less -R``, ``tee`` or the log viewer of a CI system.
The trade-off is that ``packs generate > file`` loses carriage returns and marks of direction;
``--json`` loses nothing, because JSON can escape them.

What shapes visible text stays: joiners, combining marks, variation selectors, zero-width spaces.
"""

import json
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import IO, Any, NoReturn

import click

# C0 and C1 controls besides tab and newline, marks of direction, separators of lines, embeddings
# and isolates, annotations and tags (which hide text), halves of surrogate pairs (which stand for
# bytes that are not UTF-8, and would be written as these bytes)
_STEERING = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ufff9-\ufffb"
    "\U000e0000-\U000e007f\ud800-\udfff"
)
_IN_TEXT = re.compile(f"[{_STEERING}]")
_IN_LINE = re.compile(f"[\t\n{_STEERING}]")
_MOST_NATIVE_BYTES = 1 << 16
_BAR = re.compile(r"\r|(\x1b\[A)+\Z")  # how tqdm goes to the start of a line, or up

# The functions that end the `guarded_native` blocks, called with the lock held.
_restores: list[Callable[[], None]] = []
_restoring = threading.Lock()


def printable(line: str) -> str:
    """Return text for one line of a terminal, without characters that could steer it."""
    return _IN_LINE.sub("?", line)


def printable_text(text: str) -> str:
    """Return text for a terminal as `printable` does, but with its newlines and tabs.

    Characters are replaced one by one, so pieces of a stream may be passed as they come.
    """
    return _IN_TEXT.sub("?", text)


def escaped(document: str) -> str:
    """Return a JSON document in which characters that could steer a terminal are escaped."""
    return _IN_TEXT.sub(lambda match: json.dumps(match[0])[1:-1], document)


def echo(text: str, err: bool = False, file: IO[Any] | None = None, end: str = "\n") -> None:
    """Write text to stdout, stderr or a file, without characters that could steer a terminal."""
    click.echo(printable_text(text) + end, file=file, nl=False, err=err)


class Guarded:
    """A text stream that removes what could steer a terminal from all that is written to it.

    Args:
        stream: where the text goes.
        bars: whether to pass on the two movements with which libraries draw progress bars.
    """

    def __init__(self, stream: IO[str], bars: bool = False) -> None:
        self.stream = stream
        self.bars = bars

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    @property
    def rich_proxied_file(self) -> IO[str]:
        """The stream itself, for rich, whose consoles are given text that is clean already."""
        return unguarded(self.stream)

    def write(self, text: str) -> int:
        start = movement.end() if self.bars and (movement := _BAR.match(text)) else 0
        self.stream.write(text[:start] + printable_text(text[start:]))
        return len(text)

    def writelines(self, lines: Iterator[str]) -> None:
        for line in lines:
            self.write(line)


def unguarded(stream: IO[str]) -> IO[str]:
    """Return the stream below guards and bars of rich; for output that is clean and has colours."""
    below = getattr(stream, "rich_proxied_file", None)
    return stream if below is None else unguarded(below)


def pass_on(messages: bytes) -> None:
    """Write to stderr what another process of this program, guarded itself, wrote to its own."""
    stream = unguarded(sys.stderr)
    with suppress(OSError, ValueError):  # a terminal that was closed
        stream.flush()
        stream.buffer.write(messages)
        stream.buffer.flush()


def guard() -> None:
    """Guard stdout and stderr against what libraries print of a stranger's files."""
    if not isinstance(sys.stdout, Guarded):
        sys.stdout = Guarded(sys.stdout)  # pyright: ignore[reportAttributeAccessIssue]
    if not isinstance(sys.stderr, Guarded):
        sys.stderr = Guarded(sys.stderr, bars=True)  # pyright: ignore[reportAttributeAccessIssue]


@contextmanager
def guarded() -> Iterator[None]:
    before = sys.stdout, sys.stderr
    guard()
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


@contextmanager
def guarded_native() -> Iterator[None]:
    """Guard what code that is not Python writes itself; at the end it is written to stderr.

    Nor does it get between the lines of stdout, which are results. Output of other threads waits as
    well, so this is for calls that are short.
    """
    with ExitStack() as files:
        output = files.enter_context(tempfile.TemporaryFile())
        before = {}
        for number in (1, 2):
            with suppress(OSError):  # it is closed
                before[number] = files.enter_context(open(os.dup(number), "wb", buffering=0))

        _flush()

        def restore() -> None:
            _flush()
            for number, stream in before.items():
                os.dup2(stream.fileno(), number)

            if 2 in before:
                output.seek(0)
                text = output.read(_MOST_NATIVE_BYTES).decode(errors="replace")
                with suppress(OSError):  # a terminal that was closed
                    before[2].write(printable_text(text).encode())

        _restores.append(restore)
        try:
            for number in before:
                os.dup2(output.fileno(), number)
            yield
        finally:
            with _restoring:
                _restores.remove(restore)
                restore()


def exit_at_once(code: int) -> NoReturn:
    """End the process from any thread. What waits in `guarded_native` is written first."""
    with _restoring:
        for restore in reversed(_restores):
            restore()
        os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, absent, or a pipe unread
            stream.flush()


def short(value: float) -> str:
    """Return a number with two or three digits: 0.03, 0.85, 3.14, 16.4, 1622."""
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def with_error(value: float, error: float | None, form: str) -> str:
    """Return a number with its standard error, if it has one, both in a format: ``0.81 ± 0.02``."""
    shown = f"{value:{form}}"
    return shown if error is None else f"{shown} ± {error:{form}}"
