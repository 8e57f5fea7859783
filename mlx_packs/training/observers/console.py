"""Progress of a run for people: a bar with the loss, and a line for each validation."""

from contextlib import ExitStack

from ...display import Task
from ...objectives.score import Score
from ...run_clock import COMPUTED_PER_S, TRAIN
from ..observer import Observer
from . import ObservedRun


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
            self._display.task("train", batches, done=done, part=TRAIN)
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
        """Return the losses and the throughput of a line; of rewards, which have no loss, these.

        The throughput counts all tokens where they are known, otherwise the targets.
        """
        rate = f"{line.get(COMPUTED_PER_S, line[self._rate]):,.0f} {self._unit}/s"
        if rewards := [entry["reward"] for entry in self._curve if "reward" in entry]:
            return f"reward {rewards[-1]:.3f}  {rate}"

        losses = [entry.get("valid_loss") for entry in self._curve if "valid_loss" in entry][-2:]
        text = f"loss {line['loss']:.3f}"
        if losses:
            text += f"  valid {losses[-1]:.3f}"
        if len(losses) == 2 and losses[1] < losses[0]:
            text += " ↓"
        elif len(losses) == 2:
            text += " ↑"
        return f"{text}  {rate}"

    def on_phase_end(self) -> None:
        self._open.close()
