"""What a phase tells the observers of its run, and the clock that estimates the time left."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..objectives.score import Score
from ..run_clock import RunClock
from ..runtime import mx
from .observer import Observer
from .state import TrainingState, Window
from .update import scale_facts

if TYPE_CHECKING:
    from .step import BatchStep


@dataclass
class Reports:
    """Makes the lines of a phase, and hands them to observers."""

    observers: Sequence[Observer]
    step: "BatchStep"
    phase: str = ""
    clock: RunClock | None = None

    def phase_starts(self, batches: int, done: int) -> None:
        """Announce a phase, which goes on after its first ``done`` batches."""
        for observer in self.observers:
            observer.on_phase_start(batches, done)
        if self.clock is not None:
            self.clock.restart()  # what came before is no step

    def phase_ends(self) -> None:
        """Say that a phase is over, or was ended by an error."""
        for observer in self.observers:
            observer.on_phase_end()

    def batch_done(self, loss: float, state: TrainingState) -> None:
        unit = self.step.objective.unit
        window = state.window
        entries = {
            "loss": loss,
            f"{unit}_per_s": window.targets_per_s,
            **window.computed_per_s,
            "peak_gb": mx.get_peak_memory() / 1e9,
        }
        line = self._line(state, entries)
        for observer in self.observers:
            observer.on_step(line)

    def window_done(self, state: TrainingState) -> None:
        """Report the batches since the last report, unless every update of theirs was skipped."""
        window = state.window
        unit = self.step.objective.unit
        if not window.terms:
            return
        state.window = Window()

        optimizer = self.step.stepper.optimizer
        entries = {
            "update": state.updates,
            "loss": window.loss,
            "grad_norm": state.grad_norm,
            "learning_rate": float(optimizer.learning_rate),
            f"{unit}_per_s": window.targets_per_s,
            **window.computed_per_s,
            f"trained_{unit}": state.trained_tokens,
            "peak_gb": mx.get_peak_memory() / 1e9,
            **self.step.objective.facts(),
        }
        if self.step.stepper.scaled:
            entries |= scale_facts(optimizer)

        line = self._line(state, entries)
        for observer in self.observers:
            observer.on_report(line, window.batches_per_s)

    def validated(self, score: Score, state: TrainingState, seconds: float) -> None:
        line = self._line(state, score.entries)
        for observer in self.observers:
            observer.on_validation(line, score, seconds)

    def checkpoint_written(self, folder: Path) -> None:
        for observer in self.observers:
            observer.on_checkpoint(folder)
        self.tick("save")

    def tick(self, part: str, units: int = 1) -> None:
        """Count the time since the last unit for a part of the run."""
        if self.clock is not None:
            self.clock.tick(part, units)

    def _line(self, state: TrainingState, entries: dict[str, float]) -> dict:
        line = {"batch": state.batches, **entries}
        if self.phase:
            line["phase"] = self.phase
        return line
