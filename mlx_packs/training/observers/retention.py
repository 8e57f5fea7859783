"""Removal of old checkpoints (``--keep-last``)."""

from collections.abc import Sequence
from pathlib import Path

from ...display import Display
from ...leftovers import discard
from ..checkpoint import batches_of
from ..run_folder import best_checkpoint, checkpoints
from .observer import ObservedRun, Observer


class Retention(Observer):
    """Keeps the last ``keep_last`` checkpoints of a run folder, and the best of the phase."""

    def __init__(
        self, run: Path, keep_last: int, display: Display, starts: Sequence[int] = (0,)
    ) -> None:
        """``starts`` are the batches before each phase."""
        self._run, self._keep_last, self._display = run, keep_last, display
        self._starts = starts

    @classmethod
    def of(cls, observed: ObservedRun) -> "Retention | None":
        """Return the retention that ``--keep-last`` asks for; None if all checkpoints are kept."""
        run = observed.run
        if run.train.keep_last == -1:
            return None
        starts = [phase.start for phase in run.phases]
        return cls(run.folder, run.train.keep_last, run.display, starts)

    def on_checkpoint(self, folder: Path) -> None:
        """Remove all but the last checkpoints and the best; the new one is complete by now.

        Later ones are damaged: the run was resumed from one before them.
        """
        existing = checkpoints(self._run)
        until_now = existing[: existing.index(folder) + 1]
        start = max(start for start in self._starts if start < batches_of(folder) or not start)
        kept = {*until_now[-self._keep_last :], best_checkpoint(self._run, start)}
        for old in existing:
            if old in kept:
                continue
            try:
                discard(old, old)
            except OSError as error:  # training is worth more than space on the disk
                self._display.line("note", f"{old}: cannot be removed ({error.strerror or error})")
