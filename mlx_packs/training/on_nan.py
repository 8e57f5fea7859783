"""Losses and gradients that are not finite (``--on-nan``): stop, or skip the update.

Each is an event in ``metrics.jsonl`` of the run folder, with the rows of its batches and the
number of updates that were skipped in a row, which a resumed run continues.

In float16 an overflow is the business of the loss's scale (update.py): its skipped updates are
not counted here, and a loss that overflows leads to bfloat16. There these policies apply.
"""

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ..data.dataset import Batch, Dataset
from ..display import Display
from ..errors import Float16Overflow, PackError
from ..objectives.score import Score
from ..runtime import mx, set_random_state
from .observer import Observer
from .state import METRICS, TrainingState
from .step import BatchStep, not_finite
from .update import remove_scale

if TYPE_CHECKING:
    from .settings import Run

Save = Callable[[TrainingState], Path]  # writes a checkpoint
MOST_SKIPPED = 10  # updates in a row
_SHOWN = 4  # rows in a message


class OnNan:
    """The policy of a run, whose observers are notified of what is not finite."""

    def __init__(self, run: "Run", observers: Sequence[Observer]) -> None:
        self._run = run
        self._observers = observers
        self._skipped = 0  # updates of the run
        self._in_a_row = 0

    @property
    def policy(self) -> str:
        """``stop`` or ``skip``."""
        return self._run.train.on_nan

    def facts(self) -> dict[str, int]:
        """Return how many updates were skipped, if any were."""
        return {"skipped": self._skipped} if self._skipped else {}

    def resume(self, curve: Sequence[dict], batches: int) -> None:
        """Count the skipped updates of a run that continues, by its lines of metrics.jsonl."""
        skipped = [line for line in curve if line.get("action") == "skip"]
        self._skipped = len(skipped)
        if skipped and skipped[-1]["batch"] == batches:
            self._in_a_row = int(skipped[-1].get("in_a_row") or 0)

    def updated(self) -> None:
        """Note an applied update."""
        self._in_a_row = 0

    def handle(self, number: int, fault: str, batches: Sequence[Batch]) -> None:
        """Skip an update that is not finite, or `end`.

        ``batches`` are those whose loss is not finite; all of the update if only the gradient is.
        """
        if self.policy != "skip" or self._in_a_row >= MOST_SKIPPED:
            self.end(number, fault, batches)
        self._skipped += 1
        self._in_a_row += 1
        rows = self._announced(number, fault, batches, action="skip", in_a_row=self._in_a_row)
        text = f"batch {number}: {fault}, its update is skipped.{self._shown(rows)}"
        self._run.display.line("nan", text)

    def end(self, number: int, fault: str, batches: Sequence[Batch]) -> NoReturn:
        """Raise a PackError that names the rows."""
        rows = self._announced(number, fault, batches, action="stop")

        last = "No checkpoint was due."
        if checkpoint := self._run.files.latest_checkpoint():
            last = f"The last good checkpoint is {checkpoint}."

        limit = ""
        skip = "--on-nan skip, or "
        if self.policy == "skip":
            limit = f" {MOST_SKIPPED} updates in a row were skipped."
            skip = ""
        norm = self._run.train.max_grad_norm or 0
        clipped = "" if 0 < norm <= 1 else ", or --max-grad-norm 1"

        raise PackError(
            f"step {number}: {fault}. Training stopped.{limit}{self._shown(rows)} {last} "
            f"Try {skip}a lower --learning-rate than "
            f"{self._run.train.learning_rate:g}{clipped}.",
            "diverged",
            "learning_rate",
        )

    def _announced(
        self, number: int, fault: str, batches: Sequence[Batch], **facts: object
    ) -> list[str]:
        """Tell the observers, one of which writes metrics.jsonl; return the rows of the batches."""
        rows = list(dict.fromkeys(row for batch in batches for row in batch.rows))
        for observer in self._observers:
            observer.on_event({"batch": number, "fault": fault, **facts, "rows": list(rows)})
        return rows

    def _shown(self, rows: list[str]) -> str:
        if not rows:
            return ""

        text = f" Its rows: {', '.join(rows[:_SHOWN])}"
        if len(rows) > _SHOWN:
            text += f" and {len(rows) - _SHOWN} more, all in {self._run.folder / METRICS}"
        return f"{text}."


class UpdateGuard:
    """Checks that losses, gradients and the model are finite, in float16 and elsewhere."""

    def __init__(
        self,
        step: BatchStep,
        state: TrainingState,
        on_nan: OnNan,
        save: Save,
        display: Display,
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
        """Return whether a batch, maybe with an update of this norm, is skipped."""
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
