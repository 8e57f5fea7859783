"""Train through the phases of a run: from its start or its last checkpoint to its end."""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import mlx.optimizers as optimizers

from .. import runtime
from ..adapters.trainable import Trainable
from ..data.dataset import prefetched
from ..display import VERBOSE, Display
from ..errors import BackOff, Float16Overflow, PackError
from ..objectives.objective import Objective
from ..objectives.reference import PhaseStart
from ..objectives.score import Score, StoredScore
from ..optim import carry_state
from ..run_clock import ANSWER, COMPUTED_PER_S, EVALUATE, FORWARD, TRAIN
from ..runtime import mx
from ..tasks.phases import PhaseData, RunPhase
from ..tasks.task import Trained
from .checkpoint import batches_of, load_checkpoint, load_weights, read_training_state
from .loop import Loop, LoopSettings
from .observer import Observer
from .on_nan import OnNan
from .reports import Reports
from .run_folder import best_checkpoint, latest_checkpoint, read_metrics
from .settings import Run
from .state import TrainingState
from .step import BatchStep, Stepper, Steps
from .stopping import interrupted, stopped, write_checkpoint
from .update import add_scale, scale_facts
from .update_guard import UpdateGuard
from .watch import EarlyStop, Ending, Guard, Watch, better_earlier

Scores = dict[str, Score]  # by phase
Objectives = Mapping[str, Objective]  # by phase

# Parts of a run's time, in batches.
VALIDATE = "validate"
SAVE = "save"

_LONG_S = 2  # of a forward pass

_STOPPING = ("stop", "stopping after this batch, which is saved; Ctrl-C again ends at once")


def score_phases(objectives: Objectives, data: Sequence[PhaseData], display: Display) -> Scores:
    held_out = {each.phase.name: each.held_out() for each in data}
    total = sum(examples.batches_per_epoch() for examples in held_out.values())
    whole = EVALUATE, ANSWER
    with display.task("eval", total, "held-out batches", 0, EVALUATE, whole) as bar:
        return {
            name: objectives[name].score(examples, bar.advance)
            for name, examples in held_out.items()
        }


def loop_settings(phase: RunPhase) -> LoopSettings:
    train = phase.train
    return LoopSettings(
        start=phase.start,
        iters=train.iters,
        grad_accumulation_steps=train.grad_accumulation_steps,
        steps_per_report=train.steps_per_report,
        steps_per_eval=train.steps_per_eval,
        save_every=train.save_every,
        picks_best=train.picks_best,
        best_by=train.best,
        clear_cache_threshold=train.clear_cache_threshold,
    )


def check_scores(scores: Scores, saved: bool) -> None:
    """Raise Float16Overflow if a score is not finite; ``saved``: whether there is a checkpoint."""
    if not all(math.isfinite(score.value) for score in scores.values()):
        raise Float16Overflow("the loss of the held-out examples overflows", saved)


def show_first_loss(display: Display, loss: mx.array) -> None:
    """Show the loss of a first step whose gradient will take long, too."""
    start = time.perf_counter()
    value = loss.item()
    if time.perf_counter() - start >= _LONG_S:
        display.line("train", f"first loss {value:.3f}")


@dataclass
class Fit:
    """Training through the phases of a run, and its outcome besides the trained parameters."""

    run: Run
    trainable: Trainable
    objectives: Objectives
    data: Sequence[PhaseData]  # of every phase
    observers: Sequence[Observer]
    curve: list[dict]  # the lines of metrics.jsonl, which an observer adds
    float16: bool  # whether the base computes in it, and the loss is scaled
    on_nan: OnNan
    origin: PhaseStart  # what the run started from
    guards: Sequence[Guard] = ()
    parts: int = 1  # that batches are taken in; it only grows
    state: TrainingState = field(default_factory=TrainingState)
    # Before the first phase and after each; empty where they are not known.
    scores: list[Scores] = field(default_factory=list)
    measured: dict = field(default_factory=dict)  # seconds, throughput and peak memory
    shapes: set[tuple] = field(default_factory=set)  # of batches
    traces: int = 0  # compiled
    end: dict = field(default_factory=dict)  # why it ended early, and which weights it ended with

    @property
    def unit(self) -> str:
        """What the run counts, as a plural: the unit of its last phase."""
        return self.objectives[self.run.last_phase.name].unit

    def trained(self) -> Trained:
        return Trained(self.run.phases, self.curve, self.scores, self.origin)

    def train(self, before: Scores | None = None) -> Steps[None]:
        """Train every phase that is not over; several phases need the scores ``before`` them."""
        run = self.run
        display = run.display
        mx.random.seed(run.train.seed)
        self.parts = run.train.micro_batches

        checkpoint = None
        if (point := run.place.resume_point) is not None:
            checkpoint = point.folder
            self.state = read_training_state(checkpoint)
            self.curve.extend(read_metrics(run.folder, self.state.batches))
            self.on_nan.resume(self.state.batches)
            for fault in point.damaged:
                display.line("note", fault)
            batches = f"batch {self.state.batches} of {run.last_phase.stop}"
            display.line("resume", f"{run.folder}: {batches} ({point.why})")
            self._check_end()

        mx.reset_peak_memory()
        before = self._plan_time(before)

        while True:
            try:
                optimizer = yield from self._train_phases(before, checkpoint)
                break
            except BackOff:
                checkpoint = latest_checkpoint(run.folder)
                self.state = read_training_state(checkpoint)
                self.curve[:] = read_metrics(run.folder, self.state.batches)

        if run.train.picks_best:
            self._load_best()
        elif better := better_earlier(self.curve):
            display.line("note", better)
        display.line(
            "shapes", f"{len(self.shapes)} of batches, {self.traces} compiled traces", VERBOSE
        )

        state = self.state
        self.measured = {
            "train_s": state.train_s,
            f"{self.unit}_per_s": state.trained_tokens / state.train_s,
            **self._computed(),
            "peak_gb": max(state.peak_gb, mx.get_peak_memory() / 1e9),
        }
        if self.float16 and optimizer:
            self.measured |= scale_facts(optimizer)
        self.measured |= self.on_nan.facts()

    def _computed(self) -> dict:
        """Return how many tokens were computed, if all batches of the run are counted."""
        state = self.state
        if not state.computed_tokens:
            return {}
        per_s = state.computed_tokens / state.train_s
        return {"computed_tokens": state.computed_tokens, COMPUTED_PER_S: per_s}

    def _plan_time(self, before: Scores | None) -> Scores:
        """Tell the clock of the run what is to come; return the scores of the base so far."""
        run = self.run
        clock = run.display.clock
        done = self.state.batches
        if clock is None:
            return before or {}

        clock.plan(TRAIN, run.last_phase.stop - done, limit=run.train.seconds)
        validations = 0
        saves = 1
        for data in self.data:
            phase = data.phase
            validation = data.validation()
            left = max(0, phase.stop - max(done, phase.start))
            if validation is not None:
                validations += left // phase.train.steps_per_eval * validation.batches_per_epoch()
            saves += left // phase.train.save_every

        held_out = sum(data.held_out().batches_per_epoch() for data in self.data)
        evaluations = len(run.phases) + (before is None)

        clock.plan(VALIDATE, validations, FORWARD)
        clock.plan(SAVE, saves, FORWARD)
        clock.plan(EVALUATE, evaluations * held_out, FORWARD)
        clock.restart()
        return before or {}

    def _check_end(self) -> None:
        """Note that a resumed run had ended; it cannot end before batches that it has taken."""
        run = self.run
        done = self.state.batches
        end = run.last_phase.stop
        if done > end:
            raise PackError(
                f"--resume: {run.folder} has taken {done:,} batches, and is to end after {end:,}. "
                "Pass more --iters or --epochs.",
                "conflict",
                "iters",
            )

        if done == end:
            run.display.line("note", "the run had ended; more --iters or --epochs continue it")

    def _train_phases(
        self, before: Scores, checkpoint: Path | None
    ) -> Steps[optimizers.Optimizer | None]:
        """Train every phase that is not over at a checkpoint; return the optimizer of the last."""
        run = self.run
        self.scores = [before]
        optimizer = None

        for data in self.data:
            phase = data.phase
            if self.state.batches > phase.stop and phase is not run.last_phase:  # trained before
                self.objectives[phase.name].begin(fresh=False)  # it is scored after the run
                self.scores.append(self._logged_scores(phase, before))
                continue

            previous = optimizer
            optimizer = phase.optimizer(self.on_nan.factor)
            optimizer.init(self.trainable.model.trainable_parameters())
            if self.float16:
                add_scale(optimizer)

            if checkpoint is not None:
                self.state = load_checkpoint(checkpoint, self.trainable, optimizer)
                checkpoint = None
            elif previous is not None and phase.carries_optimizer:
                carry_state(previous, optimizer)

            yield from self._train_phase(data, optimizer)
            if phase is not run.last_phase:
                scores = self._logged_scores(phase, before)
                self.scores.append(scores or self._score_after(phase))

        return optimizer

    def score(self) -> Scores:
        run = self.run
        scores = score_phases(self.objectives, self.data, run.display)
        if self.float16:
            check_scores(scores, saved=True)
        return scores

    def _train_phase(self, data: PhaseData, optimizer: optimizers.Optimizer) -> Steps[None]:
        """Train the rest of a phase, or save the run and raise RunStopped."""
        run = self.run
        phase = data.phase
        if phase.name:
            run.display.line("phase", f"{phase.name}: batches {phase.start + 1} to {phase.stop}")

        loop = self._loop_of(data, optimizer)
        batches = data.train.batches(self.state.batches - phase.start)
        self.trainable.model.train()

        limits = runtime.memory_limits(phase.train.clear_cache_threshold or 0)
        prefetched_batches = prefetched(map(loop.step.objective.ahead, batches))
        with closing(prefetched_batches) as ahead, limits:
            try:
                ending = yield from loop.steps(ahead)
            finally:
                self.parts = loop.step.parts

        self.shapes |= loop.step.stepper.shapes
        self.traces += loop.step.stepper.traces
        if ending:
            self._end(phase, ending)

    def _end(self, phase: RunPhase, ending: Ending) -> None:
        """Note why a phase is complete before its last batch, or raise why the run is not."""
        run = self.run
        if ending.signal:
            raise interrupted(run, latest_checkpoint(run.folder), ending.signal)
        if ending.fault:
            raise stopped(run, latest_checkpoint(run.folder), ending.fault, "memory")
        if self.state.batches < phase.stop:
            self.end["stopped"] = ending.reason
            text = f"batch {self.state.batches} of {phase.stop}: {ending.reason}"
            run.display.line("stop", text)

    def _loop_of(self, data: PhaseData, optimizer: optimizers.Optimizer) -> Loop:
        run = self.run
        phase = data.phase
        stepper, objective = self._stepper_of(phase, optimizer)
        step = BatchStep(stepper, objective, data.train.collate, self.parts)
        mean_inputs = data.task.mean_inputs(data)
        reports = Reports(self.observers, step, phase.name, run.display.clock, mean_inputs)
        save = partial(self._save, optimizer, reports)
        if self.on_nan.policy == "back-off" and latest_checkpoint(run.folder) is None:
            save(self.state)

        return Loop(
            settings=loop_settings(phase),
            trainable=self.trainable,
            step=step,
            state=self.state,
            validation=data.validation(),
            guard=UpdateGuard(step, self.state, self.on_nan, save, run.display),
            watch=Watch(
                self.guards, self._early_stop_of(phase), partial(run.display.line, *_STOPPING)
            ),
            reports=reports,
        )

    def _stepper_of(
        self, phase: RunPhase, optimizer: optimizers.Optimizer
    ) -> tuple[Stepper, Objective]:
        """Return what takes the steps of a phase, and the objective whose they are."""
        objective = self.objectives[phase.name]
        objective.begin(fresh=self.state.batches == phase.start)
        arguments = (
            optimizer,
            phase.train.max_grad_norm,
            self.on_nan.policy == "skip",
            getattr(mx, phase.train.exchange_dtype),
        )
        if (own := objective.make_stepper(*arguments)) is not None:
            return own, objective

        keep = getattr(objective, "keep_prefixes", None)  # of a plugin there may be none
        stepper = Stepper(self.trainable.model, objective.loss, *arguments, keep)
        if self.state.batches == 0:
            stepper.on_first_loss = partial(show_first_loss, self.run.display)
        return stepper, objective

    def _early_stop_of(self, phase: RunPhase) -> EarlyStop | None:
        """Return what ends a run without phases early; phases are trained in full."""
        if phase.name:
            return None
        train = phase.train
        return EarlyStop(
            train.patience, train.seconds, train.best, list(self.curve), self.observers
        )

    def _save(
        self, optimizer: optimizers.Optimizer, reports: Reports, state: TrainingState
    ) -> Path:
        """Write a checkpoint of the run in a state, and return its folder."""
        folder = write_checkpoint(self.run, self.guards, self.trainable, optimizer, state)
        reports.checkpoint_written(folder)
        return folder

    def _load_best(self) -> None:
        """Take the weights of the best validation score, which a checkpoint has."""
        run = self.run
        last = self.state
        by = run.train.best
        folder = best_checkpoint(run.folder, best_by=by)
        best = None
        if folder:
            best = read_training_state(folder).score(by)
        if best is None:
            raise PackError(
                "--load-best: no validation score was measured. Train longer, or lower "
                "--steps-per-eval.",
                flag="load_best",
            )

        batch = batches_of(folder)
        self.end |= {"best_batch": batch, f"best_valid_{best.measure}": best.value}
        if batch == last.batches:
            run.display.line("best", f"batch {batch}, the last: validation {best.text}")
            return

        load_weights(folder, self.trainable)
        scores = [score for line in self.curve if (score := StoredScore.of(line, by))]
        text = f"batch {batch}: validation {best.text}"
        if scores:
            text += f" ({scores[-1].value:.3f} at batch {last.batches})"
        run.display.line("best", text)

    def _score_after(self, phase: RunPhase) -> Scores:
        """Return the scores after a phase that is not the last, logged for a resumed run."""
        scores = self.score()
        held_out = {name: asdict(score) for name, score in scores.items()}
        line = {"batch": self.state.batches, "held_out": held_out, "phase": phase.name}
        for observer in self.observers:
            observer.on_held_out(line)
        return scores

    def _logged_scores(self, phase: RunPhase, before: Scores) -> Scores:
        """Return the scores after a phase from the run's metrics; empty if they are not there."""
        kind = type(before[phase.name])
        for line in self.curve:
            if "held_out" in line and line["batch"] == phase.stop:
                with suppress(TypeError, AttributeError):  # not as it was written
                    return {name: kind(**values) for name, values in line["held_out"].items()}
        return {}
