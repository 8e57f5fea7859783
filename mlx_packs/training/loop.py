"""The loop over batches: step, report, validate, save."""

import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..adapters.method import Trainable
from ..data.batches import Batch
from ..display import Display
from ..errors import Interrupted, PackError
from ..evaluation.evaluate import Score
from ..files import append_line
from ..objectives.causal_lm import Arrays
from ..runtime import mx
from .checkpoint import TrainingState, Window, save_checkpoint
from .phases import RunPhase
from .run_folder import METRICS, latest_checkpoint
from .step import Stepper


@contextmanager
def _interrupts_noted() -> Iterator[list[int]]:
    """Collect Ctrl-C instead of raising it in the middle of a step; the second one raises.

    Outside the main thread Python delivers no signals, and the list stays empty.
    """
    noted: list[int] = []

    def note(number: int, _) -> None:
        if noted:
            raise KeyboardInterrupt
        noted.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield noted
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


@dataclass
class Loop:
    """Everything that the loop over a phase's batches needs, so that it reads as one function.

    phase: what is learned, and where in the run it begins.   last: no phase comes after it.
    arrays: of a batch, what the step takes.   unit: what `Batch.count` counts.
    """

    attached: Trainable
    stepper: Stepper
    phase: RunPhase
    last: bool
    run: Path
    cursor: TrainingState
    arrays: Callable[[Batch], Arrays]
    judge: Callable[[Batch], Score]
    validate: Callable[[], Score] | None
    display: Display
    callback: object | None
    curve: list[dict]
    unit: str = "tokens"

    def learn(self, batches: Iterator[Batch]) -> None:
        """Take batches up to the end of the phase: step, report, validate, save.

        Raises: PackError at a loss or gradient that is not finite; the last checkpoint stays.
        """
        config, cursor, first = self.phase.train, self.cursor, self.phase.first
        alone = config.grad_accumulation_steps == 1
        due = False
        task = self.display.task("train", config.iters, done=cursor.batches - first)
        with task as bar, _interrupts_noted() as interrupted:
            while cursor.batches < self.phase.stop:
                batch = next(batches)
                number = cursor.batches + 1 - first
                ends = number == config.iters
                update = number % config.grad_accumulation_steps == 0 or ends
                start = time.perf_counter()
                loss, norm = self.stepper(self.arrays(batch), batch.count, update, alone)
                seconds = time.perf_counter() - start
                self._stop_if_not_finite(loss, norm, first + number)
                cursor.count(loss, batch.count, norm if update else None, seconds)
                self._limit_cache()
                bar.advance(self._status(loss))
                if number % config.steps_per_report == 0 or ends:
                    self._report()
                if self.validate and number % config.steps_per_eval == 0 and not ends:
                    self._validate()
                due = due or number % config.save_every == 0 or ends
                if (due or interrupted) and not self.stepper.pending:
                    kept = self._save(batch)
                    due = False
                    if interrupted and not (ends and self.last):
                        raise Interrupted(f"interrupted; kept {kept}. Go on with --resume.")

    def _save(self, batch: Batch) -> Path:
        """Checkpoint the model if it still works: the loss before an update does not tell."""
        self._stop_if_not_finite(self.judge(batch).nll, 0.0, self.cursor.batches)
        self.attached.model.train()
        return save_checkpoint(self.run, self.attached, self.stepper.optimizer, self.cursor)

    def _status(self, loss: float) -> str:
        """What stands beside the bar: losses, supervised tokens a second, peak memory."""
        valid = [line["valid_loss"] for line in self.curve if "valid_loss" in line][-2:]
        arrow = "" if len(valid) < 2 else " ↓" if valid[1] < valid[0] else " ↑"
        held = f"  valid {valid[-1]:.3f}{arrow}" if valid else ""
        memory = mx.get_peak_memory() / 1e9
        tokens_per_s = self.cursor.window.targets_per_s
        unit = "tok" if self.unit == "tokens" else self.unit
        return f"loss {loss:.3f}{held}  {tokens_per_s:,.0f} {unit}/s  {memory:.1f} GB"

    def _stop_if_not_finite(self, loss: float, norm: float, number: int) -> None:
        if math.isfinite(loss) and math.isfinite(norm):
            return
        kept = latest_checkpoint(self.run)
        what = f"the loss is {loss}" if not math.isfinite(loss) else "the gradient is not finite"
        raise PackError(
            f"step {number}: {what}; stopped. "
            + (f"The last good checkpoint is {kept}. " if kept else "No checkpoint was due yet. ")
            + "Try a lower --learning-rate, or --max-grad-norm 1."
        )

    def _limit_cache(self) -> None:
        limit = self.phase.train.clear_cache_threshold
        if limit is not None and mx.get_cache_memory() > limit:
            mx.clear_cache()

    def log(self, line: dict) -> None:
        """Add a line to the curve and to the run's metrics, with the phase if there are some."""
        if self.phase.name:
            line["phase"] = self.phase.name
        self.curve.append(line)
        append_line(self.run / METRICS, json.dumps(line))

    def _report(self) -> None:
        window, self.cursor.window = self.cursor.window, Window()
        line = {
            "batch": self.cursor.batches,
            "update": self.cursor.updates,
            "loss": window.loss_sum / window.targets,
            "grad_norm": self.cursor.grad_norm,
            "learning_rate": float(self.stepper.optimizer.learning_rate),
            f"{self.unit}_per_s": window.targets_per_s,
            f"trained_{self.unit}": self.cursor.trained_tokens,
            "peak_gb": mx.get_peak_memory() / 1e9,
        }
        self.log(line)
        if self.callback is not None:
            self.callback.on_train_loss_report(
                {
                    "iteration": line["batch"],
                    "train_loss": line["loss"],
                    "learning_rate": line["learning_rate"],
                    "iterations_per_second": window.batches / window.seconds,
                    f"{self.unit}_per_second": line[f"{self.unit}_per_s"],
                    f"trained_{self.unit}": line[f"trained_{self.unit}"],
                    "peak_memory": line["peak_gb"],
                }
            )

    def _validate(self) -> None:
        start = time.perf_counter()
        found = self.validate()
        self.attached.model.train()
        line = {"batch": self.cursor.batches, **found.log_entry()}
        self.log(line)
        self.display.line("valid", f"batch {line['batch']}: {found.summary()}")
        if self.callback is not None:
            took = time.perf_counter() - start
            self.callback.on_val_loss_report(
                {"iteration": line["batch"], "val_loss": found.nll, "val_time": took}
            )
