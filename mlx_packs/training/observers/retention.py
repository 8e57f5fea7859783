"""Removal of old checkpoints (``--keep-last``)."""

from pathlib import Path

from ...display import Display
from ...leftovers import discard
from ..run_folder import checkpoints
from .observer import ObservedRun, Observer


class Retention(Observer):
    """Keeps the last ``keep_last`` checkpoints of a run folder."""

    def __init__(self, run: Path, keep_last: int, display: Display) -> None:
        self._run, self._keep_last, self._display = run, keep_last, display

    @classmethod
    def of(cls, observed: ObservedRun) -> "Retention | None":
        """Return the retention that ``--keep-last`` asks for; None if all checkpoints are kept."""
        run = observed.run
        keep_last = run.train.keep_last
        return None if keep_last is None else cls(run.folder, keep_last, run.display)

    def on_checkpoint(self, folder: Path) -> None:
        """Remove what is older than the last checkpoints; the new one is complete by now.

        Checkpoints of later batches, which a run that continues from an earlier one replaces, are
        left alone.
        """
        existing = checkpoints(self._run)
        until_now = existing[: existing.index(folder) + 1]
        for old in until_now[: -self._keep_last]:
            try:
                discard(old, old)
            except OSError as error:  # training is worth more than space on the disk
                self._display.line("note", f"{old}: cannot be removed ({error.strerror or error})")
