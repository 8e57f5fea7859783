"""What may end a run between two updates: a signal, memory, patience, time, or another rank."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import signals
from ..distributed.group import group
from ..errors import BackOff, Float16Overflow

if TYPE_CHECKING:
    from .early_stop import EarlyStop
    from .step import BatchStep

_OTHER_RANK = "another rank had to stop"


@dataclass(frozen=True)
class Ending:
    """Why a run ends before its last batch; all ranks have one at the same batch."""

    signal: int = 0  # that asks for it
    fault: str = ""  # why the run cannot go on now; it may be resumed
    reason: str = ""  # why it is complete


class Guard:
    """Watches over a run; a subclass overrides what it needs."""

    def between_batches(self, step: "BatchStep", batch: Any, number: int) -> str | None:
        """Return why the run should be saved and end after batch ``number``; None to go on."""

    def before_checkpoint(self, nbytes: int) -> None:
        """Raise a PackError if a checkpoint of ``nbytes`` bytes cannot be written."""

    def at_end(self) -> None:
        """Raise a PackError if the run cannot be resumed although its pack is saved."""


class Watch:
    """Everything that may end a phase of a run early."""

    def __init__(self, guards: Sequence[Guard], early_stop: "EarlyStop | None") -> None:
        self.early_stop = early_stop  # None if a phase is only ended by faults
        self._guards = guards
        self._fault = ""
        self._signals: Sequence[int] = ()

    @contextmanager
    def deferring_signals(self) -> Iterator[None]:
        """Let a signal in a ``with`` block end the run after the update at work."""
        with signals.deferred() as self._signals:
            try:
                yield
            except (BackOff, Float16Overflow):
                if self._signals:  # the run does not go on
                    raise signals.Signalled(self._signals[0]) from None
                raise

    @property
    def is_asked_to_end(self) -> bool:
        """Whether a signal waits."""
        return bool(self._signals)

    def ended_before(self) -> Ending | None:
        """Return why a run that is resumed had ended; None if it had not."""
        reason = self._reason()
        if not reason:
            return None
        return Ending(reason=reason)

    def between_batches(self, step: "BatchStep", batch: Any, number: int) -> None:
        """Let the guards look at the run after batch ``number``."""
        if self._fault:
            return
        faults = [guard.between_batches(step, batch, number) for guard in self._guards]
        self._fault = next(filter(None, faults), "")

    def ending(self) -> Ending | None:
        """Return why the run ends now, here or on another rank; None to go on."""
        signal = 0
        if self._signals:
            signal = self._signals[0]
        fault = self._fault
        reason = self._reason()

        signal, faults, reasons = group().highest(signal, int(bool(fault)), int(bool(reason)))
        if not (signal or faults or reasons):
            return None
        if faults and not fault:
            fault = _OTHER_RANK
        if reasons and not reason:
            reason = _OTHER_RANK
        return Ending(signal, fault, reason)

    def _reason(self) -> str:
        if self.early_stop is None:
            return ""
        return self.early_stop.reason() or ""
