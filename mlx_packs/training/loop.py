"""The loop over batches: step, report, validate, save, and when each is due."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from ..data.dataset import Batch, Dataset
from ..errors import BaseChanged, ReadFailed, read_errors
from ..objectives.score import Score
from ..runtime import mx, set_random_state
from .observer import Observer
from .on_nan import UpdateGuard
from .state import TrainingState, Window
from .step import BatchStep, StartedStep
from .update import scale_facts
from .watch import Ending, Watch

if TYPE_CHECKING:
    from ..adapters.trainable import Trainable
    from ..config.schema import TrainConfig
    from ..tasks.phases import RunPhase
    from .samples import Samples


class Due:
    """What is to be done after a batch.

    A checkpoint, and a validation that may find the best weights, wait for the end of an update.
    """

    def __init__(self, train: "TrainConfig", validates: bool) -> None:
        self._train = train
        self._validates = validates
        self._score = False  # whether a validation waits
        self.report = self.validate = self.sample = self.save = False

    @property
    def anything(self) -> bool:
        return self.report or self.validate or self.sample or self.save

    def after(self, numbers: range, in_update: bool) -> None:
        """Decide it for the last batches; ``in_update``: whether their update waits for more."""
        train = self._train
        ends = numbers[-1] == train.iters
        self.report = ends or _has_multiple(numbers, train.steps_per_report)
        if train.sample_every is not None:
            self.sample = _has_multiple(numbers, train.sample_every)
        self.save = self.save or ends or _has_multiple(numbers, train.save_every)

        self._score = self._score or _has_multiple(numbers, train.steps_per_eval)
        if train.picks_best:
            self.validate = self._validates and not in_update and (self._score or ends)
            self._score = self._score and not self.validate
        else:
            self.validate = self._validates and self._score and not ends
            self._score = False


def _has_multiple(numbers: range, factor: int) -> bool:
    return any(number % factor == 0 for number in numbers)


@dataclass
class Reports:
    """Tells the observers of a phase what happens in it."""

    observers: Sequence[Observer]
    step: BatchStep
    phase: str = ""

    def phase_starts(self, batches: int, done: int) -> None:
        """Announce a phase, which goes on after its first ``done`` batches."""
        for observer in self.observers:
            observer.on_phase_start(batches, done)

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

    def _line(self, state: TrainingState, entries: dict[str, float]) -> dict:
        line = {"batch": state.batches, **entries}
        if self.phase:
            line["phase"] = self.phase
        return line


@dataclass(frozen=True)
class _StartedBatch:
    """A batch whose step was started; ``start`` is as `time.perf_counter` has it."""

    batch: Batch
    number: int  # in the phase, from 1
    updates: bool
    random: mx.array  # state before the step
    step: StartedStep
    start: float


@dataclass
class Loop:
    """The loop over the batches of a phase.

    The next step is submitted to a GPU before the loss of the last one is read, so that it never
    waits for Python; two steps are in flight at most. The peak of memory stays that of one: a step
    begins with the weights that the last one ends with, and MLX allocates for ten command buffers
    of 50 dispatches before it waits for one of them (its transforms.cpp and metal/device.cpp),
    which is part of a forward pass while the peak is at the end of one; only steps shorter than
    that can be in memory together. Reports, scores, checkpoints and the end wait for every step
    that was started, so none of them has a number or weight that was not checked.
    """

    phase: "RunPhase"
    trainable: "Trainable"
    step: BatchStep
    state: TrainingState  # the loop advances it
    validation: Dataset | None  # None if the phase is not validated
    guard: UpdateGuard
    watch: Watch
    reports: Reports
    samples: "Samples | None" = None  # with --sample-every
    _in_flight: deque[_StartedBatch] = field(default_factory=deque, init=False)
    _read_at: float = field(default=0.0, init=False)  # when the last step was over
    _random: mx.array | None = field(default=None, init=False)  # state before the next step

    def train(self, batches: Iterator[Batch]) -> Ending | None:
        """Train to the end of the phase; return why it ended before, saved.

        Raises:
            PackError: if a loss or gradient is not finite and `--on-nan` ends the run; the last
                checkpoint remains.
            Float16Overflow: if that happens in float16; the last update is saved.
            Signalled: after a signal, once a checkpoint is saved.
        """
        train = self.phase.train
        stepper = self.step.stepper
        due = Due(train, validates=self.validation is not None)
        done = self.state.batches - self.phase.first_batch
        self.reports.phase_starts(train.iters, done)
        try:
            with self.watch.deferring_signals(), self._saved_if_base_changes(), read_errors():
                ending = self.watch.ended_before()
                while done < train.iters and not ending:
                    drawn = list(islice(batches, self._at_once(done)))
                    numbers = range(done + 1, done + len(drawn) + 1)
                    done = numbers[-1]
                    batch = self._start(drawn, numbers)

                    # a GPU has this step already when the one before it is read
                    due.after(numbers, in_update=stepper.waiting > 0)
                    waits = due.anything or self.watch.is_asked_to_end
                    self._read(leaving=0 if waits else stepper.ahead)
                    self.watch.between_batches(self.step, batch, self.phase.first_batch + done)
                    ending = self._between_batches(due, batch)
                return ending
        finally:
            self.reports.phase_ends()

    def _at_once(self, done: int) -> int:
        """Return how many batches are drawn: all of an update if they pass blocks together."""
        if not self.step.together:
            return 1
        train = self.phase.train
        several = train.grad_accumulation_steps
        return min(several - done % several, train.iters - done)

    def _start(self, drawn: Sequence[Batch], numbers: range) -> Batch:
        """Start the step on batches; return the last, prepared."""
        start = time.perf_counter()
        # a run that leaves float16 goes back to the state before an update
        random = self._random = mx.random.state[0]
        several = self.phase.train.grad_accumulation_steps
        updates = numbers[-1] % several == 0 or numbers[-1] == self.phase.train.iters

        prepared = [self.step.objective.prepare(batch) for batch in drawn]
        if len(prepared) > 1:
            steps = self.step.start_together(prepared)
        else:
            steps = [self.step.start(prepared[0], updates, several == 1)]

        for number, batch, step in zip(numbers, prepared, steps, strict=True):
            is_last = updates and number == numbers[-1]
            self._in_flight.append(_StartedBatch(batch, number, is_last, random, step, start))
        self._random = mx.random.state[0]
        return prepared[-1]

    @contextmanager
    def _saved_if_base_changes(self) -> Iterator[None]:
        """Save the last update if the files of the base change, whose blocks are on disk."""
        try:
            yield
        except ReadFailed:  # the update at work is lost, and its weights with it
            raise
        except BaseChanged:
            if self._random is not None and not self.step.stepper.waiting:
                with read_errors():
                    self._read(leaving=0)
                set_random_state(self._random)
                self.guard.save_unscored()
            raise

    def _between_batches(self, due: Due, batch: Batch) -> Ending | None:
        """Report, validate and save what is due; return why the phase ends now."""
        if due.report:
            self.reports.window_done(self.state)
        if due.validate:
            due.save = self._validate() or due.save
        if (
            due.sample and self.samples is not None
        ):  # before a checkpoint, so that a resumed run has them once
            self.samples.take(self.state.batches)
            self.trainable.model.train()
        if self.step.stepper.waiting:  # nothing ends between the batches of one update
            return None

        ending = self.watch.ending()
        if due.save or ending:
            self._read(leaving=0)  # the signal may be newer
            if ending and ending.reason and not due.report:
                self.reports.window_done(self.state)
            self.guard.save(batch)
            self.trainable.model.train()
            due.save = False
        return ending

    def _read(self, leaving: int) -> None:
        """Wait for all steps in flight but the last ones; check, count and announce them."""
        train = self.phase.train
        while len(self._in_flight) > leaving:
            started = self._in_flight.popleft()
            if (started.number - 1) % train.grad_accumulation_steps == 0:
                self.guard.begin_update(started.random)

            loss, norm = started.step.read()
            if (blocks := getattr(self.trainable.model, "blocks_on_disk", None)) is not None:
                blocks.check_unchanged()
            start = max(started.start, self._read_at)
            self._read_at = time.perf_counter()
            self._count(started, loss, norm, self._read_at - start)

            limit = train.clear_cache_threshold
            if limit is not None and mx.get_cache_memory() > limit:
                mx.clear_cache()
            self.reports.batch_done(loss, self.state)

    def _count(self, started: _StartedBatch, loss: float, norm: float, seconds: float) -> None:
        batch = started.batch
        number = self.phase.first_batch + started.number
        updates = started.updates
        norm = self.guard.checked_norm(number, loss, norm)
        if self.guard.is_skipped(batch, number, updates, loss, norm):
            self.state.skip(seconds)
        else:
            self.state.count(loss, batch, norm if updates else None, seconds, mx.get_peak_memory())

    def _validate(self) -> bool:
        """Score the validation split; return whether these weights are to be kept as the best."""
        start = time.perf_counter()
        score = self.guard.validate(self.validation)
        self.state.keep_score(score, self.phase.train.best)
        self.trainable.model.train()
        self.reports.validated(score, self.state, time.perf_counter() - start)

        early_stop = self.watch.early_stop
        if early_stop is None or not self.phase.train.picks_best:
            return False
        return early_stop.add(self.state.batches, score)
