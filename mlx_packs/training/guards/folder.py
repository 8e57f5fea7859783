"""A run folder that is removed or moved while its run trains."""

import json

from ...errors import PackError
from ...files import atomic_write, make_folder
from ..run_folder import CONFIG, METRICS, check_resumable, write_identity
from .guard import Guard, Guarded


class RunFolder(Guard):
    """Writes the folder again: its identity and metrics at once, checkpoints from now on."""

    def __init__(self, guarded: Guarded) -> None:
        self._run, self._identity, self._curve = guarded.run, guarded.identity, guarded.curve

    def between_batches(self, batch: object, number: int) -> None:
        """Look for the folder."""
        self.before_checkpoint(0)

    def before_checkpoint(self, nbytes: int) -> None:
        """Write what is gone."""
        folder = self._run.folder
        if (folder / CONFIG).is_file():
            return
        self._run.display.line(
            "note", f"{folder}: was removed or moved; it is written again, without its checkpoints"
        )
        make_folder(folder)
        write_identity(folder, self._identity)
        lines = "".join(json.dumps(line) + "\n" for line in self._curve)
        atomic_write(folder / METRICS, lines)

    def at_end(self) -> None:
        """Check that the run could be resumed."""
        run = self._run
        try:
            check_resumable(run.folder)
        except (PackError, OSError):
            raise PackError(
                f"{run.folder}: was removed while its pack was written. The pack {run.pack} is "
                "complete, but this run cannot be resumed.",
                "not-found",
            ) from None
