"""The loop over batches: step, report, validate, save."""

import copy
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from .. import signals
from ..adapters.trainable import Trainable
from ..distributed.group import group
from ..errors import Float16Overflow
from ..objectives.objective import Batch, Objective
from ..objectives.score import Score
from ..run_clock import TRAIN
from ..runtime import mx
from .checkpoint import TrainingState, Window, real_inputs, set_random_state
from .early_stop import EarlyStop
from .guards.guard import Guard
from .loss_scale import remove_scale, scale_facts
from .micro_batches import MicroBatches
from .observer import Observer
from .on_nan import BackOff, OnNan
from .phases import RunPhase
from .run_folder import latest_checkpoint
from .settings import Run
from .step import StartedStep, Stepper, not_finite
from .stopping import interrupted, stopped, write_checkpoint


@dataclass(frozen=True)
class _Taken:
    """A batch whose step was started at a time, as `time.perf_counter` has it."""

    batch: Batch
    number: int  # in the run
    updates: bool
    random: mx.array  # state before the step
    step: StartedStep
    start: float


@dataclass
class Loop:
    """The loop over the batches of a phase.

    The next step is submitted to a GPU before the loss of the last one is read, so that it never waits for
    Python; two steps are in flight at most. The peak of memory stays that of one: a step begins
    with the weights that the last one ends with, and MLX allocates for ten command buffers of 50
    dispatches before it waits for one of them (its transforms.cpp and metal/device.cpp), which is
    part of a forward pass while the peak is at the end of one; only steps shorter than that can be
    in memory together. Reports, scores, checkpoints and the end wait for every step that was
    started, so none of them has a number or weight that was not checked.
    """

    run: Run
    phase: RunPhase
    trainable: Trainable
    objective: Objective
    stepper: Stepper
    state: TrainingState  # the loop advances it
    validation: Sequence[Batch]  # empty where the phase is not validated
    observers: Sequence[Observer]
    on_nan: OnNan
    guards: Sequence[Guard] = ()
    micro_batches: MicroBatches = field(default_factory=MicroBatches)
    early_stop: EarlyStop | None = None  # only checked between updates
    mean_inputs: float | None = None  # of the batches, as `Dataset.mean_inputs`
    _in_flight: deque[_Taken] = field(default_factory=deque, init=False)
    _read_at: float = field(default=0.0, init=False)  # when the last step was over
    # The last update that was read, and the random state then: an overflow in float16 leads there.
    _updated: tuple[TrainingState, mx.array] | None = field(default=None, init=False)
    # Of the update at work, the batches that were read, and what is wrong with the loss of each.
    _of_update: list[tuple[Batch, str | None]] = field(default_factory=list, init=False)
    _finite: Batch | None = field(default=None, init=False)  # the last batch whose loss was finite

    def train(self, batches: Iterator[Batch]) -> None:
        """Take batches up to the end of the phase, or to `early_stop`: step, report, validate, save.

        Raises:
            PackError: if a loss or gradient is not finite and `on_nan` ends the run; the last
                checkpoint remains.
            BackOff: if the run goes on from that.
            Float16Overflow: if that happens in float16; the last update is saved.
            RunStopped: after a signal (Ctrl-C), or because of a guard, once a checkpoint is saved.
        """
        done = self.state.batches - self.phase.start
        if self.on_nan.policy == "back-off" and latest_checkpoint(self.run.folder) is None:
            self._write_checkpoint(self.state)
        for observer in self.observers:
            observer.on_phase_start(self.phase.train.iters, done)
        if (clock := self.run.display.clock) is not None:
            clock.restart()  # what came before is no step
        try:
            with signals.deferred() as interrupts:
                try:
                    self._take(batches, interrupts)
                except (BackOff, Float16Overflow):
                    if interrupts:  # the run does not go on
                        folder = latest_checkpoint(self.run.folder)
                        raise interrupted(self.run, folder, interrupts[0]) from None
                    raise
        finally:
            for observer in self.observers:
                observer.on_phase_end()

    def _take(self, batches: Iterator[Batch], interrupts: list[int]) -> None:
        config, first, early = self.phase.train, self.phase.start, self.early_stop
        due, reason, scores = False, None, False
        if early and early.reason():  # a resumed run that had ended
            return
        for number in range(self.state.batches - first + 1, config.iters + 1):
            batch = next(batches)
            self.trainable.at((first + number - 1) / self.run.goal.stop)
            ends = number == config.iters
            self._start(batch, number)
            reports = number % config.steps_per_report == 0 or ends
            scores = scores or number % config.steps_per_eval == 0
            validates = self._validates(scores, ends)
            due = due or number % config.save_every == 0 or ends
            waits = reports or validates or due or interrupts
            self._read(leaving=0 if waits else self.stepper.ahead)
            reason = reason or self._watch(batch, first + number)
            if reports:
                self._report()
            if validates:
                due = self._validate() or due
            scores = scores and config.picks_best and not validates
            if self.stepper.waiting:
                continue
            signal, reason, over = self._agreed(
                interrupts, reason, early.reason() if early else None
            )
            if due or signal or reason or over:
                self._read(leaving=0)  # the interruption may be newer
                if over and not reports:
                    self._report()
                folder = self._save(batch)
                due = False
                if signal:
                    raise interrupted(self.run, folder, signal)
                if reason:
                    raise stopped(self.run, folder, reason, "memory")
                if over:
                    return

    def _agreed(
        self, interrupts: Sequence[int], reason: str | None, over: str | None
    ) -> tuple[int, str | None, str | None]:
        """Return the signal (0 without one) and the reasons to end that any rank has."""
        ranks, signal = group(), interrupts[0] if interrupts else 0
        signal, stops, ends = ranks.highest(signal, int(bool(reason)), int(bool(over)))
        other = "another rank had to stop"
        return signal, reason or (other if stops else None), over or (other if ends else None)

    def _validates(self, scores: bool, ends: bool) -> bool:
        """Return whether to validate, where a score is due; the best weights are a checkpoint's."""
        if not self.validation:
            return False
        if self.phase.train.picks_best:
            return (scores or ends) and not self.stepper.waiting
        return scores and not ends

    def _watch(self, batch: Batch, number: int) -> str | None:
        """Return why the run should be saved and end; None to go on."""
        reasons = [guard.between_batches(batch, number) for guard in self.guards]
        return next(filter(None, reasons), None)

    def _start(self, batch: Batch, number: int) -> None:
        """Start the step on a batch, given its number in the phase."""
        several, start = self.phase.train.grad_accumulation_steps, time.perf_counter()
        updates = number % several == 0 or number == self.phase.train.iters
        random = mx.random.state[0]
        step = self.micro_batches.start(self.stepper, self.objective, batch, updates, several == 1)
        number += self.phase.start
        self._in_flight.append(_Taken(batch, number, updates, random, step, start))

    def _read(self, leaving: int) -> None:
        """Wait for all steps in flight but the last ones; check, count and announce them."""
        config = self.phase.train
        limit, several = config.clear_cache_threshold, config.grad_accumulation_steps
        while len(self._in_flight) > leaving:
            taken = self._in_flight.popleft()
            if (taken.number - 1 - self.phase.start) % several == 0:
                self._mark_update(taken.random)
            loss, norm = taken.step.read()
            start, self._read_at = max(taken.start, self._read_at), time.perf_counter()
            self._count(taken, loss, norm, self._read_at - start)
            if limit is not None and mx.get_cache_memory() > limit:
                mx.clear_cache()
            self._weigh(taken.batch)
            self._announce(loss)

    def _count(self, taken: _Taken, loss: float, norm: float, seconds: float) -> None:
        """Check what a step gave, and count its batch."""
        if self.stepper.scaled:
            norm = self._checked_scaled(loss, norm, taken.number)
        fault = not_finite(loss, 0.0)
        self._of_update.append((taken.batch, fault))
        self._finite = self._finite if fault else taken.batch
        if taken.updates or (fault and self.on_nan.policy != "skip"):
            fault = self._check_update(norm, taken.number)
        if fault:
            self.state.skip(seconds)
        else:
            self.state.count(loss, taken.batch, norm if taken.updates else None, seconds)

    def _check_update(self, norm: float, number: int) -> str | None:
        """Return what is not finite in the current update, where it is skipped."""
        batches = [batch for batch, fault in self._of_update if fault]
        faults = [fault for _, fault in self._of_update if fault]
        fault = faults[0] if faults else not_finite(0.0, norm)
        if fault:
            self.on_nan.handle(number, fault, batches or [batch for batch, _ in self._of_update])
        else:
            self.on_nan.updated()
        self._of_update.clear()
        return fault

    def _line(self, entries: dict[str, float]) -> dict:
        """Return a line for observers, with the number of batches and the phase's name."""
        phase = {"phase": self.phase.name} if self.phase.name else {}
        return {"batch": self.state.batches, **entries, **phase}

    def _announce(self, loss: float) -> None:
        line = self._line(
            {
                "loss": loss,
                f"{self.objective.unit}_per_s": self.state.window.targets_per_s,
                **self.state.window.computed_per_s,
                "peak_gb": mx.get_peak_memory() / 1e9,
            }
        )
        for observer in self.observers:
            observer.on_step(line)

    def _report(self) -> None:
        if not self.state.window.terms:  # every update was skipped
            return
        window, self.state.window = self.state.window, Window()
        unit = self.objective.unit
        line = self._line(
            {
                "update": self.state.updates,
                "loss": window.loss,
                "grad_norm": self.state.grad_norm,
                "learning_rate": float(self.stepper.optimizer.learning_rate),
                f"{unit}_per_s": window.targets_per_s,
                **window.computed_per_s,
                f"trained_{unit}": self.state.trained_tokens,
                "peak_gb": mx.get_peak_memory() / 1e9,
                **self.objective.facts(),
                **(scale_facts(self.stepper.optimizer) if self.stepper.scaled else {}),
            }
        )
        for observer in self.observers:
            observer.on_report(line, window.batches_per_s)

    def _validate(self) -> bool:
        """Score the validation split; return whether these weights are to be kept as the best."""
        start = time.perf_counter()
        score = self._score(self.validation)
        self._tick("validate", len(self.validation))
        self.state.keep_score(score)
        self.trainable.model.train()
        seconds = time.perf_counter() - start
        line = self._line(score.entries)
        for observer in self.observers:
            observer.on_validation(line, score, seconds)
        if self.early_stop is None or not self.phase.train.picks_best:
            return False
        return self.early_stop.add(self.state.batches, score)

    def _save(self, batch: Batch) -> Path:
        """Checkpoint the model if it still works: the loss before an update does not tell."""
        if self.on_nan.policy != "skip" or self._finite is not None:
            scored = self._finite or batch
            if (parts := self.micro_batches.parts * group().shares) > 1:
                scored = self.objective.split(scored, parts)[0]
            if fault := not_finite(self._score([scored]).value, 0.0):
                self.on_nan.end(self.state.batches, fault, [scored])
        self.trainable.model.train()
        return self._write_checkpoint(self.state)

    def _write_checkpoint(self, state: TrainingState) -> Path:
        folder = write_checkpoint(
            self.run, self.guards, self.trainable, self.stepper.optimizer, state
        )
        for observer in self.observers:
            observer.on_checkpoint(folder)
        self._tick("save")
        return folder

    def _weigh(self, batch: Batch) -> None:
        """Tell the clock how large a batch is, relative to the others: lengths may differ by factors."""
        clock, inputs = self.run.display.clock, real_inputs(batch)
        if clock is not None and self.mean_inputs and inputs:
            clock.weigh(TRAIN, inputs / self.mean_inputs)

    def _tick(self, part: str, units: int = 1) -> None:
        """Count time for a part of the run."""
        if (clock := self.run.display.clock) is not None:
            clock.tick(part, units)

    def _score(self, batches: Sequence[Batch]) -> Score:
        """Score batches once every step was read; in float16 the score is finite."""
        if not self.stepper.waiting:
            self._mark_update(mx.random.state[0])
        score = self.objective.score(batches)
        if self.stepper.scaled and not math.isfinite(score.value):
            self._leave_float16(f"after batch {self.state.batches}: the loss is {score.value}")
        return score

    def _mark_update(self, random: mx.array) -> None:
        """Remember the state of the run at an update, where its loss is scaled."""
        if self.stepper.scaled:
            self._updated = copy.deepcopy(self.state), random

    def _checked_scaled(self, loss: float, norm: float, number: int) -> float:
        """Return the gradient norm of the last update in float16, which an overflow skips or ends."""
        if math.isfinite(loss) and math.isinf(norm):
            self.run.display.line(
                "dtype", f"batch {number}: a gradient overflows in float16, its update is skipped"
            )
            return self.state.grad_norm
        if fault := not_finite(loss, norm):
            self._leave_float16(f"batch {number}: {fault}")
        return norm

    def _leave_float16(self, fault: str) -> NoReturn:
        """Save the last update, after which nothing has changed, and raise Float16Overflow."""
        state, random = self._updated
        set_random_state(random)
        remove_scale(self.stepper.optimizer)
        self._write_checkpoint(state)
        raise Float16Overflow(fault, saved=True)
