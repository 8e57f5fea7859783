"""Training the trials of a sweep, rung by rung, by an executor: one class in `EXECUTORS`."""

import logging
import os
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from ..config.choices import SWEEP_RUNNERS, registered
from ..display import Display, clock
from ..errors import PackError
from .leaderboard import value_text, write_leaderboard
from .sweep import Sweep
from .trial import Result, Trial, fail, train


class LocalExecutor(Executor):
    """Calls functions in this process, one after the other."""

    workers = 1

    def submit(self, function: Callable, *args: Any) -> Future:
        """Call a function; what it raises is raised here."""
        future: Future = Future()
        future.set_result(function(*args))
        return future


class RayExecutor(AbstractContextManager):
    """Calls functions on a Ray cluster: that of ``RAY_ADDRESS``, or one on this machine.

    A function gets as many CPUs as the smallest worker has, so that each machine trains one trial
    at a time. Ray calls it again if a worker is lost.
    """

    def __enter__(self) -> "RayExecutor":
        import ray

        self._has_begun = not ray.is_initialized()
        if self._has_begun:
            ray.init(log_to_driver=False, logging_level=logging.WARNING, include_dashboard=False)

        cpus = [n["Resources"].get("CPU", 0) for n in ray.nodes() if n["Alive"]]
        cpus = [count for count in cpus if count]
        if not cpus:
            raise PackError("--runner ray: no worker of the cluster has a CPU.")

        self.workers = len(cpus)
        self._call = ray.remote(_call).options(num_cpus=min(cpus), scheduling_strategy="SPREAD")
        return self

    def submit(self, function: Callable, *args: Any) -> Future:
        """Call a function on a worker, in the same current folder."""
        return self._call.remote(os.getcwd(), function, *args).future()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        import ray

        if self._has_begun:
            ray.shutdown()
        if isinstance(error, ray.exceptions.RayError) and not isinstance(error, PackError):
            reason = str(error).strip().splitlines()[-1]
            raise PackError(f"--runner ray: {reason}", "unwritable") from error


def _call(folder: str, function: Callable, *args: Any) -> Any:
    """Call a function in a folder, since paths of a recipe may be relative."""
    os.chdir(folder)
    return function(*args)


EXECUTORS = registered(SWEEP_RUNNERS, {"local": LocalExecutor, "ray": RayExecutor})


@dataclass
class SweepRun:
    """Trains the trials of a sweep, at most as many at once as the executor has workers."""

    sweep: Sweep
    executor: LocalExecutor | RayExecutor
    display: Display
    _running: dict[Future, Trial] = field(default_factory=dict)

    def run(self) -> None:
        """Train the trials to the end of a rung, and the best of them to the end of the next.

        The leaderboard is written after each trial, so that it can be read meanwhile.
        """
        sweep = self.sweep
        trials: Iterable[Trial] = sweep.to_train()
        for rung in range(len(sweep.plan.rungs)):
            trained = self._train(trials, rung)
            if rung == 0 and len(trained) < sweep.count:
                text = f"{len(trained)} of {sweep.count} trials: no new values were found"
                self.display.line("sweep", text)

            order = [row.trial for row in sweep.ranked(rung) if not row.result.error]
            count = max(1, len(trained) // sweep.plan.config.reduction_factor)

            trials = [trial for trial in order if trial in trained][:count]
            for trial in trained:
                if trial not in trials:
                    sweep.prune(trial)
        write_leaderboard(sweep.plan.folder, sweep.leaderboard())

    def _train(self, trials: Iterable[Trial], rung: int) -> list[Trial]:
        trained = []
        for trial in trials:
            trained.append(trial)
            if (result := trial.result(rung)) is not None:  # of an earlier command
                self.sweep.tell(trial, rung, result)
                continue

            with self.display.working("trial", f"{trial.number} · {_values(trial)}"):
                self._running[self._submit(trial, rung)] = trial
            if len(self._running) == self.executor.workers:
                self._collect(rung)

        while self._running:
            self._collect(rung)
        return trained

    def _submit(self, trial: Trial, rung: int) -> Future:
        try:
            recipe = self.sweep.plan.recipe_of(trial.values).to_json()
        except PackError as error:  # of values that were drawn after the sweep was checked
            return self.executor.submit(fail, trial, rung, error.message)
        return self.executor.submit(train, trial, recipe, rung, self.sweep.plan.rungs[rung])

    def _collect(self, rung: int) -> None:
        for future in wait(self._running, return_when=FIRST_COMPLETED).done:
            trial = self._running.pop(future)
            result = future.result()
            self.sweep.tell(trial, rung, result)
            self._show(trial, rung, self._text(result))
            write_leaderboard(self.sweep.plan.folder, self.sweep.leaderboard())

    def _text(self, result: Result) -> str:
        name, value = self.sweep.metric_of(result)
        if result.error:
            text = result.error
        elif value is None:
            text = f"has no finite {name}"
        else:
            text = f"{name} {value:.4g} after {result.batches:,} batches"
        if result.train_s is not None:
            text += f" · {clock(result.train_s)}"
        if not result.error and not result.passed:
            text += " · FAILED a gate"
        return text

    def _show(self, trial: Trial, rung: int, text: str) -> None:
        rungs = len(self.sweep.plan.rungs)
        place = f"{trial.number}/{self.sweep.count}"
        if rungs > 1:
            place += f" · rung {rung + 1}/{rungs}"
        self.display.line("trial", f"{place} · {_values(trial)} · {text}")


def _values(trial: Trial) -> str:
    return ", ".join(f"{key}={value_text(value)}" for key, value in trial.values.items())
