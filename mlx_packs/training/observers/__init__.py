"""Everything that follows a training run: its observers, in the order in which they are called."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

from ...display import Task
from ...late import load
from ...objectives.score import Score
from ..observer import Observer
from ..settings import Run
from ..state import COMPUTED_PER_S, batches_of


@dataclass(frozen=True)
class ObservedRun:
    """The facts of a run that observers are created from."""

    run: Run
    unit: str  # what the run counts: tokens, pairs
    recipe: dict  # its configuration as in config.json
    curve: list[dict] = field(default_factory=list)  # the lines of metrics.jsonl so far


class Console(Observer):
    """Shows progress on the run's display."""

    def __init__(self, observed: ObservedRun) -> None:
        self._display = observed.run.display
        self._curve = observed.curve
        self._rate = f"{observed.unit}_per_s"
        self._unit = "tok" if observed.unit == "tokens" else observed.unit
        self._open = ExitStack()
        self._bar: Task | None = None

    def on_phase_start(self, batches: int, done: int) -> None:
        self._bar = self._open.enter_context(
            self._display.task("train", batches, done=done, shows_first=True)
        )

    def on_step(self, line: dict) -> None:
        self._bar.advance(f"{self._progress(line)}  {line['peak_gb']:.1f} GB")

    def on_report(self, line: dict, batches_per_s: float) -> None:
        """Leave a line above the bar; without a bar there are such lines already."""
        if self._display.live:
            rate = f"lr {line['learning_rate']:.2e}"
            self._display.line("train", f"batch {line['batch']}: {self._progress(line)}  {rate}")

    def on_validation(self, line: dict, score: Score, seconds: float) -> None:
        self._display.line("valid", f"batch {line['batch']}: {score.text}")

    def _progress(self, line: dict) -> str:
        """Return the loss or reward of a line, and its throughput, if known of all tokens."""
        rate = f"{line.get(COMPUTED_PER_S, line[self._rate]):,.0f} {self._unit}/s"
        if rewards := [entry["reward"] for entry in self._curve if "reward" in entry]:
            return f"reward {rewards[-1]:.3f}  {rate}"

        text = f"loss {line['loss']:.3f}"
        if losses := [entry["valid_loss"] for entry in self._curve if "valid_loss" in entry]:
            text += f"  valid {losses[-1]:.3f}"
        return f"{text}  {rate}"

    def on_phase_end(self) -> None:
        self._open.close()


def status_of(observed: ObservedRun) -> Observer | None:
    """Return what writes ``status.json``, which now knows the batches of the run."""
    run = observed.run
    if run.place.status is not None:
        point = run.place.resume_point
        run.place.status.begin(batches_of(point.folder) if point else 0, run.last_phase.stop)
    return run.place.status


# By name: makes the observer of a run, or None if the run's settings do not ask for it.
OBSERVERS: dict[str, str | Callable[[ObservedRun], Observer | None]] = {
    "metrics": "run_files:MetricsFile",
    "console": Console,
    "status": status_of,  # after the console, whose bar knows the pace
    "trackers": "trackers:Trackers.of",
    "retention": "run_files:Retention.of",
    "page": "run_files:ReportPage",
}


def make_observers(observed: ObservedRun) -> list[Observer]:
    """Return the observers that follow a run, its caller's last."""
    observers = []
    for make in OBSERVERS.values():
        if isinstance(make, str):
            make = load(f"training.observers.{make}")
        if (observer := make(observed)) is not None:
            observers.append(observer)
    return [*observers, *observed.run.request.callbacks]
