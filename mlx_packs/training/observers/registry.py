"""The observers of a run, in the order in which they are called."""

from collections.abc import Callable

from ..observer import Observer
from .console import Console
from .machine import Machine
from .metrics import MetricsFile
from .observed_run import ObservedRun
from .report_page import ReportPage
from .retention import Retention
from .trackers import Trackers

# By name: makes the observer of a run, or None where the run's settings do not ask for it.
OBSERVERS: dict[str, Callable[[ObservedRun], Observer | None]] = {
    "machine": Machine.of,  # before those that log a line, to which it adds
    "metrics": MetricsFile,
    "console": Console,
    "trackers": Trackers.of,
    "retention": Retention.of,
    "page": ReportPage,
}


def make_observers(observed: ObservedRun) -> list[Observer]:
    """Return the observers that follow a run, those of its caller last."""
    observers = (make(observed) for make in OBSERVERS.values())
    own = [observer for observer in observers if observer is not None]
    return [*own, *observed.run.callbacks]
