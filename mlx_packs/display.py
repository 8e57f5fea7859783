"""Progress output: lines, spinners and bars.

Colour and movement only on a terminal, plain lines otherwise; everything goes to stderr, so that
stdout contains only results. Rich honours NO_COLOR, FORCE_COLOR and the width of the terminal.
"""

import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import IO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TextColumn
from rich.progress import Task as RichTask
from rich.text import Text

from .terminal import Guarded, guarded, printable, unguarded

QUIET, NORMAL, VERBOSE = 0, 1, 2
INDENT = 8  # columns of a label
_PLAIN_SECONDS = 5.0
_BAR = 30  # columns of a bar
_BESIDE = 66  # columns of the text beside it


class _Lossy:
    """A text file whose writer continues if it is gone, such as a closed terminal."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._file.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)


class _Console(Console):
    """A console on stderr that ignores write errors: training is worth more than its messages."""

    @property
    def file(self) -> IO[str]:
        return _Lossy(super().file)  # type: ignore[return-value]

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        self._file = new_file


class Display:
    """Progress output of a command or a library call.

    Args:
        level: `QUIET` prints nothing, `NORMAL` what matters, `VERBOSE` the reasons, too.

    Attributes:
        follower: Function of a label, and the `Task` if its steps are counted: a context that lasts
            as long as this work is shown, or would be.
    """

    def __init__(self, level: int = NORMAL) -> None:
        self.level = level
        self.follower: Callable[[str, Task | None], AbstractContextManager] | None = None

        # a bar redirects what libraries print to the console, whose own file must be the terminal
        file = unguarded(sys.stderr) if isinstance(sys.stderr, Guarded) else None
        self.console = _Console(file=file, stderr=True, highlight=False, soft_wrap=True)
        self.live = self.console.is_terminal and not _is_recorded() and level > QUIET

    def line(self, label: str, text: str, level: int = NORMAL) -> None:
        """Print ``label   text`` at ``level`` and above; wrapped as by `hanging` on a terminal."""
        if self.level >= level:
            width = self.console.width if self.console.is_terminal else None
            self.console.print(_labelled(label, text, width))

    def working(self, label: str, text: str) -> AbstractContextManager:
        """Show a spinner on a terminal while something of unknown length runs."""
        spinner = self.console.status(_labelled(label, text)) if self.live else None
        return self._moving(spinner, label)

    @contextmanager
    def task(
        self, label: str, total: int, unit: str = "", done: int = 0, shows_first: bool = False
    ) -> Iterator["Task"]:
        """Show a bar on a terminal, else a plain line every few seconds.

        ``unit`` is shown beside the bar; ``done`` steps were done before. ``shows_first`` prints
        the line of the first step at once.
        """
        task = Task(self, label, total, unit, done, shows_first)
        with self._moving(task.bar, label, task):
            yield task

    @contextmanager
    def _moving(
        self, shown: AbstractContextManager | None, label: str, task: "Task | None" = None
    ) -> Iterator[None]:
        """Show a bar or spinner, if there is one, above which libraries may print."""
        is_guarded = isinstance(sys.stderr, Guarded)
        guard = guarded() if shown and is_guarded else nullcontext()
        followed = self.follower(label, task) if self.follower else nullcontext()
        with followed, shown or nullcontext(), guard:
            yield


def display_of(progress: bool | Display) -> Display:
    """Return what shows the progress of a call from Python, by its argument ``progress``."""
    if isinstance(progress, Display):
        return progress
    return Display(NORMAL if progress else QUIET)


def _is_recorded() -> bool:
    """Return whether output is recorded as it is written, so that no bar may move in it.

    Jupyter kernels set both variables, and give commands a terminal; CI sets the first for colours.
    """
    return any(os.environ.get(name) for name in ("FORCE_COLOR", "JPY_PARENT_PID"))


def _plain(text: str) -> str:
    return escape(printable(text))


def _labelled(label: str, text: str, width: int | None = None) -> str:
    """Return a line as markup of rich, wrapped if there is a width."""
    text = printable(text)
    lines = [text] if width is None else wrapped(text, width - INDENT)
    return f"[bold]{label:<7}[/bold] " + ("\n" + " " * INDENT).join(map(escape, lines))


def wrapped(text: str, width: int) -> list[str]:
    """Wrap a text between words; a word may be a path that somebody copies, and is not broken."""
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]


def hanging(line: str, width: int) -> str:
    """Wrap ``label   text``, or text that is indented as such, below itself; others stay."""
    starts_text = line[INDENT - 1 : INDENT + 1].lstrip() == line[INDENT:][:1] != " "
    has_place = line[:1].strip() or not line[:INDENT].strip()
    if not starts_text or not has_place or len(line) <= width:
        return line

    lines = wrapped(line[INDENT:], width - INDENT)
    return line[:INDENT] + ("\n" + " " * INDENT).join(lines)


class _Left(ProgressColumn):
    """The time that is left of a task."""

    def __init__(self, task: "Task") -> None:
        self._task = task
        super().__init__()

    def render(self, task: RichTask) -> Text:
        left = self._task.left()
        return Text("" if left is None else f"{clock(left)} left")


class Task:
    """Progress of one long piece of work."""

    def __init__(  # noqa: PLR0913 - its display, and what it shows
        self,
        display: Display,
        label: str,
        total: int,
        unit: str,
        done: int,
        shows_first: bool = False,
    ) -> None:
        self.display = display
        self.label = label
        self.total = total
        self.unit = unit
        self.done = self.initial = done
        self.shows_first = shows_first
        self.last_line = time.monotonic()
        self.start: float | None = None  # when the first step ended, which may compile

        self.bar: Progress | None = None
        self.id = TaskID(0)

        if display.live:
            self.bar = Progress(
                TextColumn(f"[bold]{label:<7}[/bold]"),
                BarColumn(bar_width=min(_BAR, max(8, display.console.width - _BESIDE))),
                TextColumn("{task.completed:.0f}/{task.total:.0f} {task.fields[text]}"),
                _Left(self),
                console=display.console,
                transient=True,
            )
            self.id = self.bar.add_task(label, total=total, completed=done, text=_plain(unit))

    def pace(self) -> float | None:
        """Return the mean seconds of a step since the first one; None until it is known."""
        if self.start is None or self.done == self.initial:
            return None
        return (time.monotonic() - self.start) / (self.done - self.initial)

    def left(self) -> float | None:
        """Return the seconds left at the mean pace; None until it is known."""
        pace = self.pace()
        return None if pace is None else pace * (self.total - self.done)

    def advance(self, text: str | None = None) -> None:
        """Count one more step; ``text`` is shown beside the bar."""
        self.done += 1
        is_first = self.start is None
        if is_first:
            self.start = time.monotonic()
            self.initial = self.done

        if self.bar is not None:
            self.bar.update(self.id, completed=self.done)
            if text is not None:
                self.bar.update(self.id, text=_plain(text))
            return

        is_due = (
            is_first and self.shows_first
        ) or time.monotonic() - self.last_line > _PLAIN_SECONDS
        if is_due and self.display.level > QUIET:
            self.last_line = time.monotonic()
            line = f"{self.done}/{self.total} {text or self.unit}".rstrip()
            left = self.left()
            if left is not None:
                line += f"  {clock(left)} left"
            self.display.line(self.label, line)


def clock(seconds: float) -> str:
    """Format a duration: 1:05, 2:03:04."""
    seconds = max(0, round(seconds))
    hours, rest = divmod(seconds, 3600)
    if hours:
        return f"{hours}:{rest // 60:02}:{rest % 60:02}"
    return f"{rest // 60}:{rest % 60:02}"


def size(count: float) -> str:
    """Format a number of bytes: 4.1 kB, 4.1 MB, 0.39 GB, 25.3 GB."""
    if count >= 1e10:
        return f"{count / 1e9:.1f} GB"
    if count >= 1e8:
        return f"{count / 1e9:.2f} GB"
    if count >= 1e5:
        return f"{count / 1e6:.1f} MB"
    return f"{count / 1e3:.1f} kB"


def shown_count(weights: int) -> str:
    """Format a number of weights: 7.1 M, 8.03 B."""
    return f"{weights / 1e9:.2f} B" if weights >= 1e8 else f"{weights / 1e6:.1f} M"
