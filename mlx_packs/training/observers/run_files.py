"""What observers write into a run folder, and the old checkpoints that they remove from it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...display import Display
from ...files import append_line, atomic_write
from ...filesystem import discard
from ...objectives.score import Score
from ...report.facts import PAGE
from ...report.page import render
from ..observer import Observer
from ..run_folder import REPORT, RunFolder
from ..run_page import attempt, run_facts, write_report
from ..state import METRICS, batches_of
from . import ObservedRun


class ReportPage(Observer):
    """Writes report.json and report.html when a run ends or is interrupted."""

    def __init__(self, observed: ObservedRun) -> None:
        self._folder = observed.run.folder
        self._display = observed.run.display
        self._has_page = False

    def on_phase_start(self, batches: int, done: int) -> None:
        """Remove the result of a run that continues."""
        (self._folder / REPORT).unlink(missing_ok=True)

    def on_phase_end(self) -> None:
        """Write the page of a run that may not go on."""
        self._has_page = self._write_page()

    def on_end(self, report: dict) -> None:
        folder = self._folder
        attempt(lambda: write_report(folder, report), folder / REPORT, self._display)
        if self._has_page and self._write_page():
            self._display.line("page", str(folder / PAGE))

    def _write_page(self) -> bool:
        file = self._folder / PAGE
        return attempt(
            lambda: atomic_write(file, render(run_facts(self._folder))), file, self._display
        )


class MetricsFile(Observer):
    """Adds each line to the run's curve, which is in memory, and to its metrics.jsonl."""

    def __init__(self, observed: ObservedRun) -> None:
        self._file = observed.run.folder / METRICS
        self._curve = observed.curve

    def _append(self, line: dict) -> None:
        self._curve.append(line)
        append_line(self._file, json.dumps(line))

    def on_report(self, line: dict, batches_per_s: float) -> None:
        self._append(line)

    def on_validation(self, line: dict, score: Score, seconds: float) -> None:
        self._append(line)

    def on_event(self, line: dict) -> None:
        self._append(line)

    def on_held_out(self, line: dict) -> None:
        """Log the scores after a phase; a resumed run reads them from here."""
        self._append(line)


@dataclass
class Retention(Observer):
    """Keeps the last ``--keep-last`` checkpoints of a run folder, and the best of the phase."""

    run: Path
    keep_last: int
    display: Display
    starts: Sequence[int] = (0,)  # batches before each phase
    best_by: str | None = None

    @classmethod
    def of(cls, observed: ObservedRun) -> "Retention | None":
        """Return the retention for ``--keep-last``; None if all checkpoints are kept."""
        run = observed.run
        if run.train.keep_last == -1:
            return None

        starts = [phase.first_batch for phase in run.phases]
        return cls(run.folder, run.train.keep_last, run.display, starts, run.train.best)

    def on_checkpoint(self, folder: Path) -> None:
        """Remove all but the last checkpoints up to a new one, and the best of its phase."""
        existing = RunFolder(self.run).checkpoints()
        # later ones are damaged: the run was resumed before them
        until_now = existing[: existing.index(folder) + 1]
        start = max(start for start in self.starts if start < batches_of(folder) or not start)
        best = RunFolder(self.run).best_checkpoint(start, self.best_by)
        newest_and_best = {*until_now[-self.keep_last :], best}

        for old in existing:
            if old in newest_and_best:
                continue
            try:
                discard(old, old)
            except OSError as error:  # training is worth more than space on the disk
                self.display.line("note", f"{old}: cannot be removed ({error.strerror or error})")
