"""The observers of a run, in the order in which they are called."""

from collections.abc import Callable

from ...late import load
from ..observer import Observer
from .observed_run import ObservedRun

# By name: makes the observer of a run, or None if the run's settings do not ask for it.
OBSERVERS: dict[str, str | Callable[[ObservedRun], Observer | None]] = {
    "machine": "machine:Machine.of",  # before those that log a line, to which it adds
    "metrics": "metrics:MetricsFile",
    "console": "console:Console",
    "trackers": "trackers:Trackers.of",
    "retention": "retention:Retention.of",
    "page": "report_page:ReportPage",
}


def make_observers(observed: ObservedRun) -> list[Observer]:
    """Return the observers that follow a run, those of its caller last."""
    observers = []
    for make in OBSERVERS.values():
        if isinstance(make, str):
            make = load(f"training.observers.{make}")
        if (observer := make(observed)) is not None:
            observers.append(observer)
    return [*observers, *observed.run.request.callbacks]
