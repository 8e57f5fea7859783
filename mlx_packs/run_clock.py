"""How long a run will still take, from what its parts have taken so far."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

COMPUTED_PER_S = "computed_tokens_per_s"  # in log lines: all tokens, including those without a loss
TRAIN = "train"
EVALUATE = "evaluate"  # in held-out batches
ANSWER = "answer"  # in questions
# Costs of work that was not measured yet, in training steps on as many tokens.
FORWARD = 0.4
DECODE = 0.6


@dataclass
class _ClockPart:
    """A kind of work: its units, and the seconds of those that are done."""

    units: float = 0
    cost: float = 1.0  # of a unit, in training batches, until one is measured
    limit: float | None = None  # of its seconds
    done: float = 0
    seconds: float = 0.0
    first: tuple[float, float] = (0, 0.0)  # units and seconds of the first measurement


class RunClock:
    """Estimates the time that is left of a whole run: training, evaluations, checkpoints.

    All time counts for the part whose units it ended with. The pace of a part is measured; a part
    that has not started is estimated at its cost times the time of a training batch.

    Args:
        compiles: whether the first training batch compiles, and says nothing about the next ones.
    """

    def __init__(
        self, now: Callable[[], float] = time.monotonic, *, compiles: bool = False
    ) -> None:
        self._now = now
        self._compiles = compiles
        self._parts: dict[str, _ClockPart] = {}
        self._mark = now()

    def plan(self, name: str, units: float, cost: float = 1.0, limit: float | None = None) -> None:
        """Add units of work to a part; that of training is ``train``.

        ``cost`` is the time of a unit in training batches, until one is measured; ``limit`` is the
        maximum number of seconds, which ends the part early.
        """
        part = self._parts.setdefault(name, _ClockPart())
        part.units += units
        part.cost = cost
        part.limit = limit

    def restart(self) -> None:
        """Count the time since the last unit for no part."""
        self._mark = self._now()

    def tick(self, name: str, units: float = 1) -> None:
        """Count the time since the last unit for a part, of which ``units`` are done."""
        now = self._now()
        seconds = now - self._mark
        self._mark = now
        part = self._parts.get(name)
        if part is None:
            return

        if not part.done:
            part.first = units, seconds
        part.done += units
        part.seconds += seconds

    def count(self, names: Iterable[str]) -> tuple[int, int]:
        """Return how many units of some parts are done, and how many there are."""
        parts = [self._parts[name] for name in names if name in self._parts]
        return round(sum(part.done for part in parts)), round(sum(part.units for part in parts))

    def left(self) -> float | None:
        """Return the seconds left; None until a representative training batch was measured."""
        batch = self._pace(TRAIN)
        if batch is None:
            return None

        seconds = 0.0
        for name, part in self._parts.items():
            pace = self._pace(name)
            if pace is None:
                pace = part.cost * batch
            needed = max(0.0, part.units - part.done) * pace
            if part.limit is not None:
                needed = min(needed, max(0.0, part.limit - part.seconds))
            seconds += needed

        return max(0.0, seconds - (self._now() - self._mark))

    def _pace(self, name: str) -> float | None:
        """Return the seconds of a unit.

        The first unit of training, which compiles, does not count once there is another.
        """
        part = self._parts.get(name)
        if part is None or not part.done:
            return None

        units, seconds = part.first
        if name == TRAIN and part.done > units:
            return (part.seconds - seconds) / (part.done - units)
        if name == TRAIN and self._compiles and part.done < part.units:
            return None
        return part.seconds / part.done
