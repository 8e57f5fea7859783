"""The space for the next checkpoint."""

import shutil
from pathlib import Path

from ...display import size
from ...errors import PackError
from ...files import write_errors
from ...leftovers import discard
from ..run_folder import best_checkpoint, checkpoints
from .guard import Guard, Guarded

_SPARE = 1 << 20  # bytes for what else a run writes
_KEPT = 2  # newest checkpoints that are never removed for space


class DiskSpace(Guard):
    """Makes room for a checkpoint where old ones may be removed, or ends the run before it is begun."""

    def __init__(self, guarded: Guarded) -> None:
        self._run = guarded.run

    def before_checkpoint(self, nbytes: int) -> None:
        """Compare the free space with a checkpoint's size."""
        run, needed = self._run, nbytes + _SPARE
        while (free := shutil.disk_usage(run.folder).free) < needed:
            older = self._removable()
            if not older:
                raise PackError(
                    f"{run.folder}: {size(free)} are free, but a checkpoint takes {size(needed)}. "
                    "Free some space.",
                    "unwritable",
                )
            run.display.line("note", f"{older[0]}: removed, {size(free)} are free on the disk")
            with write_errors(older[0]):
                discard(older[0], older[0])

    def _removable(self) -> list[Path]:
        """Return the checkpoints that may be removed, the oldest first."""
        run = self._run
        if run.train.keep_last == -1:  # all are to be kept
            return []
        best = best_checkpoint(run.folder)
        return [folder for folder in checkpoints(run.folder)[:-_KEPT] if folder != best]
