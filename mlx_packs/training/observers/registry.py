"""The observers of a run, in the order in which they are called."""

from collections.abc import Callable

from .console import Console
from .metrics import MetricsFile
from .observer import ObservedRun, Observer
from .retention import Retention
from .trackers import Trackers

# By name: makes the observer of a run, or None where the run's settings do not ask for it.
OBSERVERS: dict[str, Callable[[ObservedRun], Observer | None]] = {
    "metrics": MetricsFile,
    "console": Console,
    "trackers": Trackers.of,
    "retention": Retention.of,
}


def make_observers(observed: ObservedRun) -> list[Observer]:
    """Return the observers that follow a run."""
    observers = (make(observed) for make in OBSERVERS.values())
    return [observer for observer in observers if observer is not None]
