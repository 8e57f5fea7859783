"""What a phase tells the observers of its run, and the clock that estimates the time left."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..data.dataset import Batch
from ..objectives.score import Score
from ..run_clock import TRAIN, RunClock
from ..runtime import mx
from .observer import Observer
from .state import TrainingState, Window
from .update import scale_facts

if TYPE_CHECKING:
    from .step import BatchStep


class Reports:
    """Makes the lines of a phase, and hands them to observers."""

    def __init__(
        self,
        observers: Sequence[Observer],
        step: "BatchStep",
        phase: str = "",
        clock: RunClock | None = None,
        mean_inputs: float | None = None,
    ) -> None:
        self.observers = observers
        self._step = step
        self._phase = phase
        self._clock = clock
        self._mean_inputs = mean_inputs  # of a usual batch, if batches differ

    def phase_starts(self, batches: int, done: int) -> None:
        """Announce a phase, which goes on after its first ``done`` batches."""
        for observer in self.observers:
            observer.on_phase_start(batches, done)
        if self._clock is not None:
            self._clock.restart()  # what came before is no step

    def phase_ends(self) -> None:
        """Say that a phase is over, or was ended by an error."""
        for observer in self.observers:
            observer.on_phase_end()

    def batch_done(self, batch: Batch, loss: float, state: TrainingState) -> None:
        if self._clock is not None and self._mean_inputs and batch.computed:
            # lengths of batches may differ by factors
            self._clock.weigh(TRAIN, batch.computed / self._mean_inputs)

        unit = self._step.objective.unit
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
        unit = self._step.objective.unit
        if not window.terms:
            return
        state.window = Window()

        optimizer = self._step.stepper.optimizer
        entries = {
            "update": state.updates,
            "loss": window.loss,
            "grad_norm": state.grad_norm,
            "learning_rate": float(optimizer.learning_rate),
            f"{unit}_per_s": window.targets_per_s,
            **window.computed_per_s,
            f"trained_{unit}": state.trained_tokens,
            "peak_gb": mx.get_peak_memory() / 1e9,
            **self._step.objective.facts(),
        }
        if self._step.stepper.scaled:
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
        if self._clock is not None:
            self._clock.tick(part, units)

    def _line(self, state: TrainingState, entries: dict[str, float]) -> dict:
        line = {"batch": state.batches, **entries}
        if self._phase:
            line["phase"] = self._phase
        return line
