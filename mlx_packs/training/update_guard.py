"""Checks that losses, gradients and the model are finite, in float16 and elsewhere (on_nan.py)."""

import copy
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ..data.dataset import Batch, Dataset
from ..errors import Float16Overflow
from ..objectives.score import Score
from ..runtime import mx, set_random_state
from .state import TrainingState
from .step import not_finite
from .update import remove_scale

if TYPE_CHECKING:
    from ..display import Display
    from .on_nan import OnNan
    from .step import BatchStep

Save = Callable[[TrainingState], Path]  # writes a checkpoint


class UpdateGuard:
    """Checks the results of the steps of a phase."""

    def __init__(
        self,
        step: "BatchStep",
        state: TrainingState,
        on_nan: "OnNan",
        save: Save,
        display: "Display",
    ) -> None:
        self._step = step
        self._state = state
        self._on_nan = on_nan
        self._save = save
        self._display = display
        # The last update that was read, and the random state then: an overflow leads there.
        self._updated: tuple[TrainingState, mx.array] | None = None
        # Of the update at work, the batches that were read, and what is wrong with each loss.
        self._of_update: list[tuple[Batch, str | None]] = []
        self._finite: Batch | None = None  # the last batch whose loss was finite

    def begin_update(self, random: mx.array) -> None:
        """Remember the run before an update, with its random state, if its loss is scaled."""
        if self._step.stepper.scaled:
            self._updated = copy.deepcopy(self._state), random

    def is_skipped(
        self, batch: Batch, number: int, updates: bool, loss: float, norm: float
    ) -> bool:
        """Return whether a batch is no part of an update, because something is not finite.

        ``updates`` is whether an update came with it, whose gradient has this norm. Raises
        PackError if the run ends, and BackOff if it goes on from its last checkpoint.
        """
        fault = not_finite(loss, 0.0)
        self._of_update.append((batch, fault))
        if not fault:
            self._finite = batch
        if updates or (fault and self._on_nan.policy != "skip"):
            fault = self._check_update(norm, number)
        return bool(fault)

    def checked_norm(self, number: int, loss: float, norm: float) -> float:
        """Return the gradient norm of the last update, which is another one after an overflow."""
        if not self._step.stepper.scaled:
            return norm
        if math.isfinite(loss) and math.isinf(norm):
            self._display.line(
                "dtype", f"batch {number}: a gradient overflows in float16, its update is skipped"
            )
            return self._state.grad_norm
        if fault := not_finite(loss, norm):
            self._leave_float16(f"batch {number}: {fault}")
        return norm

    def validate(self, data: Dataset) -> Score:
        """Return the score of the validation split, once every step was read."""
        return self._checked_score(partial(self._step.objective.validate, data))

    def _checked_score(self, score_of: Callable[[], Score]) -> Score:
        """Score the model; in float16 the score is finite, or the run leaves it."""
        stepper = self._step.stepper
        if not stepper.waiting:
            self.begin_update(mx.random.state[0])
        score = score_of()
        if stepper.scaled and not math.isfinite(score.value):
            self._leave_float16(f"after batch {self._state.batches}: the loss is {score.value}")
        return score

    def save(self, batch: Batch) -> None:
        """Write a checkpoint if the model still works: the loss before an update does not tell."""
        if self._on_nan.policy != "skip" or self._finite is not None:
            scored = self._step.first_piece(self._finite or batch)
            score = self._checked_score(partial(self._step.objective.score_trained, scored))
            if fault := not_finite(score.value, 0.0):
                self._on_nan.end(self._state.batches, fault, [scored])
        self._save(self._state)

    def save_unscored(self) -> None:
        """Write a checkpoint where the model cannot be computed."""
        self._save(self._state)

    def _check_update(self, norm: float, number: int) -> str | None:
        """Return what is not finite in the current update, which is then skipped."""
        batches = [batch for batch, fault in self._of_update if fault]
        faults = [fault for _, fault in self._of_update if fault]
        fault = faults[0] if faults else not_finite(0.0, norm)
        if fault:
            self._on_nan.handle(number, fault, batches or [batch for batch, _ in self._of_update])
        else:
            self._on_nan.updated()
        self._of_update.clear()
        return fault

    def _leave_float16(self, fault: str) -> NoReturn:
        """Save the last update, after which nothing has changed, and raise Float16Overflow."""
        state, random = self._updated
        set_random_state(random)
        remove_scale(self._step.stepper.optimizer)
        self._save(state)
        raise Float16Overflow(fault, saved=True)
