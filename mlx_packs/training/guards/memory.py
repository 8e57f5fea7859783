"""Memory pressure while a run trains: smaller micro-batches first, then the end, saved."""

import time
from typing import Any

from ...memory.pressure import CRITICAL, LOW, memory_pressure
from ...runtime import mx
from .guard import Guard, Guarded

_EVERY = 1.0  # seconds between two readings of the system
_WORTHWHILE = 32 << 20  # bytes of freed buffers that are released before batches are split


class Memory(Guard):
    """Reads the state of the system once a second.

    Under pressure MLX's freed buffers are released; then batches are taken in twice as many
    pieces, which changes an update by rounding alone; where a piece is one row already, the run ends
    before the system swaps, once the pressure is critical.
    """

    def __init__(self, guarded: Guarded) -> None:
        self._guarded = guarded
        self._next = time.monotonic() + _EVERY

    def between_batches(self, batch: Any, number: int) -> str | None:
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
        guarded = self._guarded
        if guarded.micro_batches.halve(guarded.objective, batch):
            self._announce(number, pressure.reason)
            return None
        if pressure.level == CRITICAL:
            return f"memory is short: {pressure.reason}"
        return None

    def _announce(self, number: int, reason: str) -> None:
        guarded = self._guarded
        parts = guarded.micro_batches.parts
        guarded.run.display.line(
            "memory", f"{reason}: from batch {number + 1} on each is taken in {parts} micro-batches"
        )
        line = {"batch": number, "micro_batches": parts, "memory_pressure": reason}
        for observer in guarded.observers:
            observer.on_event(line)
