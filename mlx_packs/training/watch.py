"""What may end a run before its end: a signal, memory, patience, time, or another rank.

A run ends on purpose by its patience, its time, or an observer's wish: then it is complete.
"""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from .. import signals
from ..display import Display, clock
from ..distributed.group import group
from ..errors import BaseChanged, Float16Overflow, PackError, RunStopped, flag_of
from ..memory.pressure import CRITICAL, LOW, memory_pressure
from ..objectives.score import LOSS, Score, StoredScore, was_scored
from ..runtime import mx
from .observer import Observer

if TYPE_CHECKING:
    from ..config.schema import TrainConfig
    from ..data.dataset import Batch
    from ..data.rows import Splits
    from .settings import Run
    from .step import BatchStep

_OTHER_RANK = "another rank had to stop"
_EVERY = 1.0  # seconds between two readings of the system
_WORTHWHILE = 32 << 20  # bytes of freed buffers that are released before batches are split


@dataclass(frozen=True)
class Ending:
    """Why a run ends before its last batch; all ranks have one at the same batch."""

    signal: int = 0  # that asks for it
    fault: str = ""  # why the run cannot go on now; it may be resumed
    reason: str = ""  # why it is complete


class Memory:
    """Reads the state of the system once a second.

    Under pressure MLX's freed buffers are released; then batches are taken in twice as many pieces,
    which changes an update by rounding only; if a piece is one row already, the run ends before the
    system swaps, once the pressure is critical.
    """

    def __init__(self, display: Display, observers: Sequence[Observer]) -> None:
        self._display = display
        self._observers = observers
        self._next = monotonic() + _EVERY

    def fault(self, step: "BatchStep", batch: "Batch", number: int) -> str:
        """Return why the run should end after batch ``number``, if nothing smaller is possible."""
        if (now := monotonic()) < self._next:
            return ""
        self._next = now + _EVERY

        pressure = memory_pressure()
        if pressure.level >= LOW and mx.get_cache_memory() >= _WORTHWHILE:
            mx.clear_cache()
            pressure = memory_pressure()
        if pressure.level < LOW:
            return ""

        if step.use_smaller_pieces(batch):
            self._announce(number, step.parts, pressure.reason)
        elif pressure.level == CRITICAL:
            return f"memory is short: {pressure.reason}"
        return ""

    def _announce(self, number: int, parts: int, reason: str) -> None:
        self._display.line(
            "memory", f"{reason}: from batch {number + 1} on each is taken in {parts} micro-batches"
        )
        line = {"batch": number, "micro_batches": parts, "memory_pressure": reason}
        for observer in self._observers:
            observer.on_event(line)


class Watch:
    """Everything that may end a phase of a run early."""

    def __init__(
        self,
        memory: Memory | None = None,
        early_stop: "EarlyStop | None" = None,
        say_stopping: Callable[[], None] = lambda: None,
    ) -> None:
        self._say_stopping = say_stopping
        self.early_stop = early_stop  # None if a phase is only ended by faults
        self._memory = memory
        self._fault = ""
        self._signals: Sequence[int] = ()

    @contextmanager
    def deferring_signals(self) -> Iterator[None]:
        """Let a signal in a ``with`` block end the run after the update at work."""
        with signals.announced(self._say_stopping), signals.deferred() as self._signals:
            try:
                yield
            except Float16Overflow:
                if self._signals:  # the run does not go on
                    raise signals.Signalled(self._signals[0]) from None
                raise

    @property
    def is_asked_to_end(self) -> bool:
        return bool(self._signals)

    def ended_before(self) -> Ending | None:
        """Return why a run that is resumed had ended; None if it had not."""
        reason = self._reason()
        if not reason:
            return None
        return Ending(reason=reason)

    def between_batches(self, step: "BatchStep", batch: "Batch", number: int) -> None:
        """Read the state of the memory after batch ``number``."""
        if self._memory is not None and not self._fault:
            self._fault = self._memory.fault(step, batch, number)

    def ending(self) -> Ending | None:
        """Return why the run ends now, here or on another rank; None to go on."""
        received = self._signals[0] if self._signals else 0
        fault = self._fault
        reason = self._reason()

        received, faults, reasons = group().highest(received, int(bool(fault)), int(bool(reason)))
        if not (received or faults or reasons):
            return None
        if faults and not fault:
            fault = _OTHER_RANK
        if reasons and not reason:
            reason = _OTHER_RANK
        return Ending(received, fault, reason)

    def _reason(self) -> str:
        if self.early_stop is None:
            return ""
        return self.early_stop.reason() or ""


_CLEARLY = 0.01  # better, as a share of the score


@dataclass
class EarlyStop:
    """The best validation score of a run so far, and why it should end now."""

    # Validations without a better score that end the run; None for no limit.
    patience: int | None = None
    seconds: float | None = None  # that it trains for; None for no limit
    best_by: str | None = None  # the entry of a score that is compared; None is its value
    curve: Sequence[dict] = ()  # of metrics.jsonl; a resumed run continues with what it tells
    observers: Sequence[Observer] = ()  # of the run, each of which may end it
    batch: int = 0  # of the best score
    best: Score | None = None
    since: int = 0  # validations after it
    _started: float = field(default_factory=lambda: monotonic())

    def __post_init__(self) -> None:
        for line in self.curve:
            if was_scored(line):
                self._compare(line["batch"], StoredScore.of(line, self.best_by))

    def add(self, batch: int, score: Score) -> bool:
        """Record a validation score; return whether it is the best."""
        return self._compare(batch, score.by(self.best_by))

    def _compare(self, batch: int, score: Score | None) -> bool:
        """Compare a score with the best one; None is one that was not finite."""
        if score is not None and score.is_better_than(self.best):
            self.batch = batch
            self.best = score
            self.since = 0
            return True
        self.since += 1
        return False

    def reason(self) -> str | None:
        """Return why the run should end, in words; None to go on."""
        if self.patience is not None and self.since >= self.patience:
            times = f"{self.patience} validations" if self.patience > 1 else "a validation"

            direction = "lower"
            measure = LOSS
            if self.best:
                measure = self.best.measure
                if self.best.higher_is_better:
                    direction = "higher"

            return f"no {direction} validation {measure} in {times}"

        if self.seconds is not None and monotonic() - self._started >= self.seconds:
            return f"it trained for {clock(self.seconds)} (--time)"

        reasons = (observer.stop_reason for observer in self.observers)
        return next(filter(None, reasons), None)


def check_validated(train: "TrainConfig", splits: "Splits") -> None:
    """Raise a PackError for a setting that needs validation examples, if there are none."""
    named = train.changed(("load_best", "patience", "sample_every"))
    if named and not len(splits.rows["valid"]):
        raise PackError(
            f"{flag_of(named[0])}: {splits.source} has no validation examples. Add some, or remove "
            "the test examples: then a part of the training examples is held out.",
            "conflict",
            named[0],
        )


def better_earlier(curve: Sequence[dict]) -> str | None:
    """Return which earlier batch had a clearly better validation score than the last one."""
    validated = [line for line in curve if StoredScore.of(line)]
    if not validated:
        return None

    end = validated[-1]
    last = StoredScore.of(end)
    scores = EarlyStop(curve=[x for x in validated if x.get("phase") == end.get("phase")])
    best = scores.best
    if best is None or not best.is_better_than(last, by=_CLEARLY):
        return None

    return (
        f"the validation {best.measure} was {best.value:.3f} at batch {scores.batch} and "
        f"{last.value:.3f} at batch {end['batch']}: --load-best ends with the best weights"
    )


def interrupted(run: "Run", checkpoint: Path, number: int) -> RunStopped:
    """Return the error that ends a run after a signal."""
    reason = "interrupted"
    if number != signal.SIGINT:
        reason += f" ({signal.Signals(number).name})"
    return RunStopped(reason, checkpoint, run.pack, exit_code=128 + number)


@contextmanager
def resumable(run: "Run") -> Iterator[None]:
    """Raise `RunStopped` for a signal, a disk or a base that fails, if there is a checkpoint."""
    try:
        yield
    except KeyboardInterrupt as error:
        if (checkpoint := run.files.latest_checkpoint()) is None:
            raise
        raise interrupted(run, checkpoint, signals.number_of(error)) from None
    except PackError as error:
        checkpoint = run.files.latest_checkpoint()
        can_continue = error.code == "unwritable" or isinstance(error, BaseChanged)
        if isinstance(error, RunStopped) or not can_continue or checkpoint is None:
            raise
        reason = error.message.rstrip(".")
        raise RunStopped(reason, checkpoint, run.pack, error.code) from None
