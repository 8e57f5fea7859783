"""The files report.json, report.html and loss.png of a run folder."""

import threading
from collections.abc import Callable

from ...errors import PackError, reason_of
from ...files import atomic_write
from ...report import picture
from ...report.facts import PAGE, Points, curve_of
from ...report.page import render
from ..observer import Observer
from ..run_folder import PICTURE, REPORT
from ..run_page import run_facts, write_report
from .observed_run import ObservedRun

_LEAST_POINTS = 3  # of a curve that is worth a picture


class ReportPage(Observer):
    """Writes the page of a run when it ends or is interrupted, and the picture of its curve.

    The picture is drawn beside the last evaluation: to import matplotlib takes as long as many a
    batch. A run that succeeded is not ended by a file that cannot be written: there is a note.
    """

    def __init__(self, observed: ObservedRun) -> None:
        self._observed = observed
        self._drawing: threading.Thread | None = None
        self._noted: set[str] = set()  # files about which there was a note

    def on_phase_start(self, batches: int, done: int) -> None:
        """Remove the result of a run that continues."""
        (self._observed.run.folder / REPORT).unlink(missing_ok=True)

    def on_phase_end(self) -> None:
        """Write the page of a run that may not go on, and begin to draw its curve."""
        self._attempt(PAGE, self._write_page)
        curve = curve_of(self._observed.curve)
        if len(curve.get("loss", [])) < _LEAST_POINTS or not picture.is_installed():
            return

        self._join()
        args = (PICTURE, lambda: self._write_picture(curve))
        self._drawing = threading.Thread(target=self._attempt, args=args)
        self._drawing.start()

    def on_end(self, report: dict) -> None:
        observed = self._observed
        folder = observed.run.folder
        self._attempt(REPORT, lambda: write_report(folder, report, observed.masks))
        self._attempt(PAGE, self._write_page)
        self._join()
        if PAGE not in self._noted:
            observed.run.display.line("page", str(folder / PAGE))

    def _join(self) -> None:
        if self._drawing is not None:
            self._drawing.join()

    def _write_page(self) -> None:
        folder = self._observed.run.folder
        atomic_write(folder / PAGE, render(run_facts(folder)))

    def _write_picture(self, curve: dict[str, Points]) -> None:
        run = self._observed.run
        label = "loss"
        if self._observed.unit == "tokens":
            label = "loss (nats per token)"
        picture.save_picture(curve, run.folder / PICTURE, run.pack.name, label)

    def _attempt(self, name: str, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:  # whatever it is, a run is worth more than its page
            reason = error.message if isinstance(error, PackError) else reason_of(error)
            if name not in self._noted:
                self._noted.add(name)
                run = self._observed.run
                file = run.folder / name
                run.display.line("note", f"{file}: is not written ({reason.rstrip('.')})")
