"""Removal of old checkpoints (``--keep-last``)."""

from collections.abc import Sequence
from pathlib import Path

from ...display import Display
from ...leftovers import discard
from ..checkpoint import batches_of
from ..observer import Observer
from ..run_folder import best_checkpoint, checkpoints
from .observed_run import ObservedRun


class Retention(Observer):
    """Keeps the last ``keep_last`` checkpoints of a run folder, and the best of the phase."""

    def __init__(
        self,
        run: Path,
        keep_last: int,
        display: Display,
        starts: Sequence[int] = (0,),
        resumed: Path | None = None,
        best_by: str | None = None,
    ) -> None:
        """``starts`` are the batches before each phase, ``resumed`` is where a run continues."""
        self._run = run
        self._keep_last = keep_last
        self._display = display
        self._starts = starts
        self._resumed = resumed
        self._best_by = best_by

    @classmethod
    def of(cls, observed: ObservedRun) -> "Retention | None":
        """Return the retention for ``--keep-last``; None if all checkpoints are kept."""
        run = observed.run
        if run.train.keep_last == -1:
            return None

        starts = [phase.start for phase in run.phases]
        resumed = None
        if (point := run.place.resume_point) is not None:
            resumed = point.folder
        return cls(run.folder, run.train.keep_last, run.display, starts, resumed, run.train.best)

    def on_phase_start(self, batches: int, done: int) -> None:
        """Remove what a killed run left, which ended between a checkpoint and the removal."""
        if self._resumed is not None:
            last = batches_of(self._resumed)
            self._keep([f for f in checkpoints(self._run) if batches_of(f) <= last], self._resumed)
            self._resumed = None

    def on_checkpoint(self, folder: Path) -> None:
        """The new one is complete. Later ones are damaged: the run was resumed before them."""
        self._keep(checkpoints(self._run), folder)

    def _keep(self, existing: list[Path], newest: Path) -> None:
        """Keep the last checkpoints up to the newest, and the best of its phase."""
        until_now = existing[: existing.index(newest) + 1]
        start = max(start for start in self._starts if start < batches_of(newest) or not start)
        best = best_checkpoint(self._run, start, self._best_by)
        newest_and_best = {*until_now[-self._keep_last :], best}

        for old in existing:
            if old in newest_and_best:
                continue
            try:
                discard(old, old)
            except OSError as error:  # training is worth more than space on the disk
                self._display.line("note", f"{old}: cannot be removed ({error.strerror or error})")
