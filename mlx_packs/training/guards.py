"""Guards of what a run depends on: its folder, the disk, the memory."""

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..display import Display, size
from ..errors import PackError
from ..files import write_errors
from ..filesystem import discard
from ..memory.pressure import CRITICAL, LOW, memory_pressure
from ..runtime import mx
from .observer import Observer
from .settings import Run
from .step import BatchStep
from .watch import Guard

_SPARE = 1 << 20  # bytes for what else a run writes
_KEPT = 2  # newest checkpoints that are never removed for space
_EVERY = 1.0  # seconds between two readings of the system
_WORTHWHILE = 32 << 20  # bytes of freed buffers that are released before batches are split


@dataclass(frozen=True)
class FolderGuard(Guard):
    """Writes the folder again: its identity and metrics at once, checkpoints from now on."""

    run: Run
    identity: dict  # as config.json has it
    curve: list[dict]  # the lines of metrics.jsonl so far

    def between_batches(self, step: object, batch: object, number: int) -> None:
        self.before_checkpoint(0)

    def before_checkpoint(self, nbytes: int) -> None:
        """Write what is gone."""
        files = self.run.files
        if files.has_identity:
            return

        text = "was removed or moved; it is written again, without its checkpoints"
        self.run.display.line("note", f"{files.path}: {text}")
        files.restore(self.identity, self.curve)

    def at_end(self) -> None:
        """Check that the run could be resumed."""
        run = self.run
        try:
            run.files.check_resumable()
        except (PackError, OSError):
            raise PackError(
                f"{run.folder}: was removed while its pack was written. The pack {run.pack} is "
                "complete, but this run cannot be resumed.",
                "not-found",
            ) from None


@dataclass(frozen=True)
class DiskSpace(Guard):
    """Removes old checkpoints to make room for the next, or ends the run before it is written."""

    run: Run

    def before_checkpoint(self, nbytes: int) -> None:
        run = self.run
        needed = nbytes + _SPARE
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
        run = self.run
        if run.train.keep_last == -1:  # all are to be kept
            return []
        best = run.files.best_checkpoint(best_by=run.train.best)
        return [folder for folder in run.files.checkpoints()[:-_KEPT] if folder != best]


class Memory(Guard):
    """Reads the state of the system once a second.

    Under pressure MLX's freed buffers are released; then batches are taken in twice as many pieces,
    which changes an update by rounding only; if a piece is one row already, the run ends before the
    system swaps, once the pressure is critical.
    """

    def __init__(self, display: Display, observers: Sequence[Observer]) -> None:
        self._display = display
        self._observers = observers
        self._next = time.monotonic() + _EVERY

    def between_batches(self, step: BatchStep, batch: Any, number: int) -> str | None:
        """Return why the run should end, where nothing smaller is possible."""
        if (now := time.monotonic()) < self._next:
            return None
        self._next = now + _EVERY

        pressure = memory_pressure()
        if pressure.level >= LOW and mx.get_cache_memory() >= _WORTHWHILE:
            mx.clear_cache()
            pressure = memory_pressure()
        if pressure.level < LOW:
            return None

        if step.use_smaller_pieces(batch):
            self._announce(number, step.parts, pressure.reason)
            return None
        if pressure.level == CRITICAL:
            return f"memory is short: {pressure.reason}"
        return None

    def _announce(self, number: int, parts: int, reason: str) -> None:
        self._display.line(
            "memory", f"{reason}: from batch {number + 1} on each is taken in {parts} micro-batches"
        )
        line = {"batch": number, "micro_batches": parts, "memory_pressure": reason}
        for observer in self._observers:
            observer.on_event(line)
