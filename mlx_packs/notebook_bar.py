"""A progress bar for the output of a notebook cell, where a terminal's bar does not work."""

import sys
import time
from types import TracebackType
from typing import Any

_CELLS = 30
_SECONDS = 0.5  # between two updates


def in_notebook() -> bool:
    """Return whether this is the kernel of a notebook, whose cells can show a bar."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return type(shell).__name__ == "ZMQInteractiveShell"


class NotebookBar:
    """A line of text that is updated in place, with the methods of rich's ``Progress``."""

    def __init__(self, label: str, total: int, done: int, text: str) -> None:
        self.label = label
        self.total = total
        self.done = self._first = done
        self.text = text
        self._start = self._shown = time.monotonic()
        self._handle: Any = None

    def __enter__(self) -> "NotebookBar":
        from IPython.display import DisplayHandle

        self._handle = DisplayHandle()
        self._handle.display(self._bundle(), raw=True)
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handle.update(self._bundle(), raw=True)

    def update(self, _: object, completed: int | None = None, text: str | None = None) -> None:
        """Set the progress and the text beside the bar; redraw at most twice a second."""
        if completed is not None:
            self.done = completed
        if text is not None:
            self.text = text

        if self._handle is not None and time.monotonic() - self._shown >= _SECONDS:
            self._shown = time.monotonic()
            self._handle.update(self._bundle(), raw=True)

    def line(self) -> str:
        cells = round(_CELLS * self.done / max(1, self.total))
        bar = "━" * cells + "─" * (_CELLS - cells)
        line = f"{self.label:<7} {bar} {self.done}/{self.total} {self.text}"

        if self._first < self.done < self.total:
            pace = (time.monotonic() - self._start) / (self.done - self._first)
            left = round(pace * (self.total - self.done))
            line += f"  {left // 60}:{left % 60:02} left"

        return line.rstrip()

    def _bundle(self) -> dict[str, str]:
        return {"text/plain": self.line()}
