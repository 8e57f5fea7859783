"""Train through the phases of a run: from its start or its last checkpoint to its end."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import mlx.optimizers as optimizers

from .. import runtime
from ..adapters.trainable import Trainable, round_adapters
from ..config.choices import TASKS
from ..data.dataset import Batch, prefetched
from ..display import VERBOSE, Display
from ..errors import Float16Overflow, PackError, RunStopped
from ..files import make_folder
from ..nn.recompute import blocks_together
from ..objectives.objective import Objective
from ..objectives.reference import PhaseReference
from ..objectives.score import Score, StoredScore
from ..ops import _backend, dispatch
from ..optim import carry_state
from ..runtime import mx
from ..tasks.phases import PhaseData, RunPhase
from ..tasks.task import Trained
from .checkpoint import load_checkpoint, load_weights, save_checkpoint
from .loop import Loop, Reports
from .observer import Observer
from .observers import ObservedRun, make_observers
from .on_nan import OnNan, UpdateGuard
from .prepare import PreparedRun
from .samples import Samples
from .state import COMPUTED_PER_S, TrainingState, batches_of, read_training_state
from .step import BatchStep, Stepper
from .update import add_scale, scale_facts
from .watch import EarlyStop, Ending, Memory, Watch, better_earlier, interrupted

Scores = dict[str, Score]  # by phase
Objectives = Mapping[str, Objective]  # by phase

_STOPPING = ("stop", "stopping after this batch, which is saved; Ctrl-C again ends at once")


def score_phases(objectives: Objectives, data: Sequence[PhaseData], display: Display) -> Scores:
    held_out = {each.phase.name: each.held_out for each in data}
    total = sum(examples.batches_per_epoch() for examples in held_out.values())
    with display.task("eval", total, "held-out batches") as bar:
        return {
            name: objectives[name].score(examples, bar.advance)
            for name, examples in held_out.items()
        }


def check_scores(scores: Scores, saved: bool) -> None:
    """Raise Float16Overflow if a score is not finite; ``saved`` if there is a checkpoint."""
    if not all(math.isfinite(score.value) for score in scores.values()):
        raise Float16Overflow("the loss of the held-out examples overflows", saved)


@dataclass
class Fit:
    """Training through the phases of a run, and its outcome besides the trained parameters."""

    prepared: PreparedRun
    trainable: Trainable
    objectives: Objectives
    origin: PhaseReference  # what the run started from
    before: Scores | None  # the scores at the start; several phases need them
    observed: ObservedRun
    observers: Sequence[Observer]
    parts: int = 1  # that batches are taken in; it only grows
    state: TrainingState = field(default_factory=TrainingState)
    # Before the first phase and after each; empty where they are not known.
    scores: list[Scores] = field(default_factory=list)
    measured: dict = field(default_factory=dict)  # seconds, throughput and peak memory
    shapes: set[tuple] = field(default_factory=set)  # of batches
    traces: int = 0  # compiled
    end: dict = field(default_factory=dict)  # why it ended early, and which weights it ended with

    def __post_init__(self) -> None:
        self.run = self.prepared.run
        self.data = self.prepared.data
        self.curve = self.observed.curve
        self.unit = self.observed.unit
        self.float16 = self.prepared.dtype.name == "float16"  # then the loss is scaled
        self.on_nan = OnNan(self.run, self.observers)
        self.memory = Memory(self.run.display, self.observers)
        self.samples = Samples.of(self.prepared)

    @property
    def trained(self) -> Trained:
        """What is measured, once the run is over."""
        sources = self.prepared.sources
        phases = self.run.phases
        results = (self.curve, self.scores, self.origin)
        return Trained(self.trainable, self.data, sources, phases, *results)

    def train(self) -> None:
        """Train every phase that is not over, and score the result on the held-out examples."""
        run = self.run
        display = run.display
        mx.random.seed(run.train.seed)
        self.parts = run.train.micro_batches
        checkpoint = self._resume()
        if self.samples is not None:
            self.samples.begin(self.state.batches, self.origin)

        mx.reset_peak_memory()
        optimizer = self._train_phases(checkpoint)
        if run.train.picks_best:
            self._load_best()
        elif better := better_earlier(self.curve):
            display.line("note", better)
        display.line(
            "shapes", f"{len(self.shapes)} of batches, {self.traces} compiled traces", VERBOSE
        )
        self._measure(optimizer)

        if dispatch.detect() != "reference":
            display.line("kernels", _backend.summary())
        round_adapters(self.trainable, run.train.pack_dtype)
        if self.before is None:
            with self.origin.active():
                self.scores[0] = self.score()
        self.scores.append(self.score())

    def _resume(self) -> Path | None:
        """Continue from the state of the last checkpoint, and return it; None in a new run."""
        run = self.run
        if (point := run.place.resume_point) is None:
            return None

        self.state = read_training_state(point.folder)
        self.curve.extend(run.files.metrics_until(self.state.batches))
        self.on_nan.resume(self.curve, self.state.batches)
        for fault in point.damaged:
            run.display.line("note", fault)
        why = "the newest that is not damaged" if point.damaged else "the newest checkpoint"
        batches = f"batch {self.state.batches} of {run.last_phase.stop}"
        run.display.line("resume", f"{run.folder}: {batches} ({point.folder.name}, {why})")
        self._check_end()
        return point.folder

    def _measure(self, optimizer: optimizers.Optimizer | None) -> None:
        """Note times, throughput and memory; ``optimizer`` is the last phase's, if it trained."""
        state = self.state
        computed = {}
        if state.computed_tokens:  # all batches of the run are counted
            per_s = state.computed_tokens / state.train_s
            computed = {"computed_tokens": state.computed_tokens, COMPUTED_PER_S: per_s}

        self.measured = {
            "train_s": state.train_s,
            f"{self.unit}_per_s": state.trained_tokens / state.train_s,
            **computed,
            "peak_gb": max(state.peak_gb, mx.get_peak_memory() / 1e9),
        }
        if self.float16 and optimizer:
            self.measured |= scale_facts(optimizer)
        self.measured |= self.on_nan.facts()

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

    def _train_phases(self, checkpoint: Path | None) -> optimizers.Optimizer | None:
        """Train every phase that is not over at a checkpoint; return the optimizer of the last."""
        run = self.run
        self.scores = [self.before or {}]
        optimizer = None

        for data in self.data:
            phase = data.phase
            if self.state.batches > phase.stop and phase is not run.last_phase:  # trained before
                self.objectives[phase.name].begin(fresh=False)  # it is scored after the run
                self.scores.append(self._logged_scores(phase))
                continue

            optimizer = self._optimizer_of(phase, optimizer, checkpoint)
            checkpoint = None
            if phase.name:
                text = f"{phase.name}: batches {phase.first_batch + 1} to {phase.stop}"
                run.display.line("phase", text)

            loop = self._loop_of(data, optimizer)
            with self._batches(data, loop) as batches:
                ending = loop.train(batches)
            if ending:
                self._end(phase, ending)
            if phase is not run.last_phase:
                self.scores.append(self._logged_scores(phase) or self._score_after(phase))

        return optimizer

    def _optimizer_of(
        self, phase: RunPhase, previous: optimizers.Optimizer | None, checkpoint: Path | None
    ) -> optimizers.Optimizer:
        """Return a phase's optimizer, with the state of a checkpoint or of the phase before."""
        optimizer = phase.optimizer()
        optimizer.init(self.trainable.model.trainable_parameters())
        if self.float16:
            add_scale(optimizer)

        if checkpoint is not None:
            self.state = load_checkpoint(checkpoint, self.trainable, optimizer)
        elif previous is not None and phase.carries_optimizer:
            carry_state(previous, optimizer)
        return optimizer

    @contextmanager
    def _batches(self, data: PhaseData, loop: Loop) -> Iterator[Iterator[Batch]]:
        """Yield the remaining batches of a phase, which another thread reads ahead."""
        phase = data.phase
        self.trainable.model.train()
        limits = runtime.memory_limits(phase.train.clear_cache_threshold or 0)
        batches = data.train.batches(self.state.batches - phase.first_batch)
        ahead = prefetched(map(loop.step.objective.ahead, batches))
        try:
            with closing(ahead), limits:
                yield ahead
        finally:
            self.parts = loop.step.parts
        self.shapes |= loop.step.stepper.shapes
        self.traces += loop.step.stepper.traces

    def score(self) -> Scores:
        run = self.run
        scores = score_phases(self.objectives, self.data, run.display)
        if self.float16:
            check_scores(scores, saved=True)
        return scores

    def _end(self, phase: RunPhase, ending: Ending) -> None:
        """Note why a phase is complete before its last batch, or raise why the run is not."""
        run = self.run
        if ending.signal:
            raise interrupted(run, run.files.latest_checkpoint(), ending.signal)
        if ending.fault:
            checkpoint = run.files.latest_checkpoint()
            raise RunStopped(ending.fault, checkpoint, run.pack, "memory")
        if self.state.batches < phase.stop:
            self.end["stopped"] = ending.reason
            text = f"batch {self.state.batches} of {phase.stop}: {ending.reason}"
            run.display.line("stop", text)

    def _loop_of(self, data: PhaseData, optimizer: optimizers.Optimizer) -> Loop:
        run = self.run
        phase = data.phase
        stepper, objective = self._stepper_of(phase, optimizer)
        blocks = getattr(self.trainable.model, "blocks_on_disk", None)
        together = blocks_together if blocks is not None and blocks.together else None
        step = BatchStep(stepper, objective, data.train.collate, self.parts, together)
        reports = Reports(self.observers, step, phase.name)
        save = partial(self._save, optimizer, reports)

        return Loop(
            phase=phase,
            trainable=self.trainable,
            step=step,
            state=self.state,
            validation=data.validation,
            guard=UpdateGuard(step, self.state, self.on_nan, save, run.display),
            watch=Watch(
                self.memory, self._early_stop_of(phase), partial(run.display.line, *_STOPPING)
            ),
            reports=reports,
            samples=self.samples,
        )

    def _stepper_of(
        self, phase: RunPhase, optimizer: optimizers.Optimizer
    ) -> tuple[Stepper, Objective]:
        """Return what takes the steps of a phase, and the objective whose they are."""
        objective = self.objectives[phase.name]
        objective.begin(fresh=self.state.batches == phase.first_batch)
        arguments = (
            optimizer,
            phase.train.max_grad_norm,
            self.on_nan.policy == "skip",
            getattr(mx, phase.train.exchange_dtype),
        )

        stepper = objective.make_stepper(*arguments)
        if stepper is None:
            stepper = Stepper(self.trainable.model, objective.loss, *arguments)
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
        folder = save_checkpoint(self.run.folder, self.trainable, optimizer, state)
        reports.checkpoint_written(folder)
        return folder

    def _load_best(self) -> None:
        """Take the weights of the best validation score, which a checkpoint has."""
        run = self.run
        last = self.state
        by = run.train.best
        folder = run.files.best_checkpoint(best_by=by)
        best = read_training_state(folder).score(by) if folder else None
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
        held_out = {name: score.to_json() for name, score in scores.items()}
        line = {"batch": self.state.batches, "held_out": held_out, "phase": phase.name}
        for observer in self.observers:
            observer.on_held_out(line)
        return scores

    def _logged_scores(self, phase: RunPhase) -> Scores:
        """Return the scores after a phase from the run's metrics; empty if they are not there."""
        kind = type(self.before[phase.name])
        for line in self.curve:
            if "held_out" in line and line["batch"] == phase.stop:
                with suppress(TypeError, AttributeError, KeyError):  # not as it was written
                    scores = line["held_out"].items()
                    return {name: kind.from_json(values) for name, values in scores}
        return {}


def start_fit(
    prepared: PreparedRun, trainable: Trainable, objectives: Objectives, origin: PhaseReference
) -> Fit:
    """Open the run folder and return the training; the first step waits for no score if it can."""
    run = prepared.run
    float16 = prepared.dtype.name == "float16"
    before = None
    generates = any(TASKS[task].generates for task in run.train.tasks)  # which tries the reward
    if float16 or generates or len(run.phases) > 1 or run.begins_with_adapters:
        with origin.active():
            before = score_phases(objectives, prepared.data, run.display)
        if float16:
            check_scores(before, saved=False)

    unit = objectives[run.last_phase.name].unit
    observed = ObservedRun(run, unit, prepared.identity["recipe"])
    observers = make_observers(observed)

    make_folder(run.folder)
    if not run.place.resume:
        run.files.clear()
    run.files.write_identity(prepared.identity)
    origin.save()

    return Fit(prepared, trainable, objectives, origin, before, observed, observers)
