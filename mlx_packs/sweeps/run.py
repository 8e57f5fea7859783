"""Training the trials of a sweep, rung by rung, by an executor."""

from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field

from ..display import Display, clock
from ..errors import PackError
from ..report.scatter import value_text
from .executors import Executor
from .leaderboard import write_leaderboard
from .sweep import Sweep
from .trial import Result, Trial, train, write_result


@dataclass
class SweepRun:
    """Trains the trials of a sweep.

    Attributes:
        sweep: the sweep.
        executor: trains trials, at most ``workers`` at once.
        display: where progress goes.
    """

    sweep: Sweep
    executor: Executor
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
            order = [row.trial for row in sweep.ranked(rung) if not row.result.error]
            count = max(1, len(trained) // sweep.plan.config.reduction_factor)

            trials = [trial for trial in order if trial in trained][:count]
            for trial in trained:
                if trial not in trials:
                    sweep.prune(trial)
        write_leaderboard(sweep.plan.folder, sweep.leaderboard())

    def _train(self, trials: Iterable[Trial], rung: int) -> list[Trial]:
        """Train trials to the end of a rung, and return them."""
        trained = []
        for trial in trials:
            trained.append(trial)
            if (result := trial.result(rung)) is not None:
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
        """Check the recipe of a trial, and let the executor train it."""
        try:
            recipe = self.sweep.plan.recipe_of(trial.values).to_json()
        except PackError as error:
            return self.executor.submit(write_result, trial, rung, Result(error=error.message))
        return self.executor.submit(train, trial, recipe, rung, self.sweep.plan.rungs[rung])

    def _collect(self, rung: int) -> None:
        """Wait for a trial, and show what came of it."""
        for future in wait(self._running, return_when=FIRST_COMPLETED).done:
            trial = self._running.pop(future)
            result = future.result()
            self.sweep.tell(trial, rung, result)
            self._show(trial, rung, result)
            write_leaderboard(self.sweep.plan.folder, self.sweep.leaderboard())

    def _show(self, trial: Trial, rung: int, result: Result) -> None:
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

        rungs = len(self.sweep.plan.rungs)
        place = f"{trial.number}/{self.sweep.count}"
        if rungs > 1:
            place += f" · rung {rung + 1}/{rungs}"
        self.display.line("trial", f"{place} · {_values(trial)} · {text}")


def _values(trial: Trial) -> str:
    """Return the values of a trial in one line."""
    return ", ".join(f"{key}={value_text(value)}" for key, value in trial.values.items())
