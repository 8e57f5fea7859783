"""What people see while something runs: one line for each question they have at that moment.

Colour and movement only on a terminal, plain lines otherwise; everything goes to stderr, so that
stdout carries results alone. Rich honours NO_COLOR and the width of the terminal.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from .errors import printable

QUIET, NORMAL, VERBOSE = 0, 1, 2
_PLAIN_SECONDS = 5.0


class Display:
    """Lines and bars for a person. ``level``: 0 nothing, 1 what matters, 2 the reasons too."""

    def __init__(self, level: int = NORMAL):
        self.level = level
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        self.live = self.console.is_terminal and level > QUIET

    def line(self, label: str, text: str, level: int = NORMAL) -> None:
        """``label   text``, the label in bold."""
        if self.level >= level:
            self.console.print(f"[bold]{label:<7}[/bold] {escape(printable(text))}")

    @contextmanager
    def working(self, label: str, text: str) -> Iterator[None]:
        """A sign of life on a terminal while something runs whose length is not known."""
        if not self.live:
            yield
            return
        with self.console.status(f"[bold]{label:<7}[/bold] {escape(printable(text))}"):
            yield

    @contextmanager
    def task(self, label: str, total: int, unit: str = "", done: int = 0) -> Iterator["Task"]:
        """A bar on a terminal, else a plain line every few seconds; ``done`` were done before."""
        task = Task(self, label, total, unit, done)
        try:
            yield task
        finally:
            task.close()


class Task:
    """Progress of one long piece of work."""

    def __init__(self, display: Display, label: str, total: int, unit: str, done: int):
        self.display = display
        self.label = label
        self.total = total
        self.unit = unit
        self.done = self.before = done
        self.start = self.shown = time.monotonic()
        self.bar: Progress | None = None
        if display.live:
            self.bar = Progress(
                TextColumn(f"[bold]{label:<7}[/bold]"),
                BarColumn(bar_width=30),
                TextColumn("{task.completed:.0f}/{task.total:.0f} {task.fields[text]}"),
                TimeRemainingColumn(compact=True),
                TextColumn("left"),
                console=display.console,
                transient=True,
            )
            self.bar.start()
            self.id = self.bar.add_task(label, total=total, completed=done, text=unit)

    def advance(self, text: str | None = None) -> None:
        """One more is done; ``text`` stands beside the bar."""
        self.done += 1
        if self.bar is not None:
            fields = {} if text is None else {"text": text}
            self.bar.update(self.id, completed=self.done, **fields)
        elif time.monotonic() - self.shown > _PLAIN_SECONDS and self.display.level > QUIET:
            self.shown = time.monotonic()
            pace = (self.shown - self.start) / (self.done - self.before)
            left = pace * (self.total - self.done)
            text = f" {text}" if text else ""
            self.display.line(self.label, f"{self.done}/{self.total}{text}  {clock(left)} left")

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()


def clock(seconds: float) -> str:
    """Minutes and seconds, as people read them."""
    seconds = max(0, round(seconds))
    hours, rest = divmod(seconds, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


def size(count: float) -> str:
    """Bytes, as people read them: 4.1 MB, 0.39 GB, 25.3 GB."""
    if count >= 1e10:
        return f"{count / 1e9:.1f} GB"
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def shown_count(weights: int) -> str:
    """A number of weights for people: 7.1 M, 8.03 B."""
    return f"{weights / 1e9:.2f} B" if weights >= 1e8 else f"{weights / 1e6:.1f} M"
