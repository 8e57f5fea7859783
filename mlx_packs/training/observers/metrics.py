"""The file metrics.jsonl of a run folder, and the same lines in memory."""

import json

from ...files import append_line
from ...objectives.score import Score
from ..observer import Observer
from ..run_folder import METRICS
from .observed_run import ObservedRun


class MetricsFile(Observer):
    """Adds each line to the run's curve and to its metrics.jsonl."""

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
