"""Everything that follows a training run: its observers, in the order in which they are called."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ...late import load
from ..observer import Observer
from ..settings import Run


@dataclass(frozen=True)
class ObservedRun:
    """The facts of a run that observers are created from."""

    run: Run
    unit: str  # what the run counts: tokens, pairs
    recipe: dict  # its configuration as in config.json
    curve: list[dict] = field(default_factory=list)  # the lines of metrics.jsonl so far
    masks: Sequence[dict] = ()  # some training examples, as `data.token_store` has them


# By name: makes the observer of a run, or None if the run's settings do not ask for it.
OBSERVERS: dict[str, str | Callable[[ObservedRun], Observer | None]] = {
    "machine": "machine:Machine.of",  # before those that log a line, to which it adds
    "metrics": "run_files:MetricsFile",
    "console": "console:Console",
    "trackers": "trackers:Trackers.of",
    "retention": "run_files:Retention.of",
    "page": "run_files:ReportPage",
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
