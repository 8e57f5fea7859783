"""A sweep: its trials in a study of Optuna, and their results in the folders of the trials."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState, create_trial

from ..config.choices import SEARCHES
from ..gates import MEANING
from .metrics import is_lower_better
from .plan import Plan
from .space import Space, Values, draws
from .trial import Result, Trial


@dataclass(frozen=True)
class Row:
    """A trial with its last result, and the metric that it is compared by."""

    trial: Trial
    rung: int
    result: Result
    metric: str
    value: float | None

    @property
    def status(self) -> str:
        """What became of the trial, in one or a few words."""
        if self.result.error:
            return f"failed: {self.result.error}"
        if self.value is None:
            return "failed: the metric was not measured, or is not finite"
        names = [MEANING[n] for n, g in (self.result.gates or {}).items() if not g["passed"]]
        return f"gate failed: {', '.join(names)}" if names else "ok"

    def order(self) -> tuple:
        """Return the key that sorts the best first: those that pass all gates, then by metric."""
        if self.value is None or self.result.error:
            return (2, 0.0, self.trial.number)
        value = self.value if is_lower_better(self.metric) else -self.value
        return (int(not self.result.passed), value, self.trial.number)


@dataclass(frozen=True)
class Sweep:
    """A sweep that has begun; its study has a trial of Optuna for each of its trials."""

    plan: Plan
    study: Study

    @property
    def trials(self) -> list[Trial]:
        """The trials so far."""
        folder = self.plan.folder / "trials"
        return [
            Trial(number, each.params, folder / f"{number:03d}")
            for number, each in enumerate(self.study.get_trials(deepcopy=False), 1)
        ]

    @property
    def count(self) -> int:
        """Number of trials, those that are not drawn yet included."""
        return self.plan.config.trials or len(self.plan.values)

    def to_train(self) -> Iterator[Trial]:
        """Yield the trials; those of a search that learns are drawn one by one."""
        yield from self.trials
        if not SEARCHES[self.plan.config.search].learns:
            return
        while len(self.trials) < self.count:
            values = self._draw()
            if values is None:  # all were tried
                return
            self.study.add_trial(running(self.plan.space, values))
            yield self.trials[-1]

    def _draw(self) -> Values | None:
        """Return values for the next trial. Packs that fail a gate count as infeasible."""
        earlier = self.study.get_trials()
        for trial, known in zip(self.trials, earlier, strict=True):
            result = trial.result(len(self.plan.rungs) - 1)
            if result is not None and not result.passed:
                known.set_constraint("gates", 1.0)
        lower = is_lower_better(self.plan.metrics[0])
        return next(draws(self.plan.config, self.plan.space, earlier, 1, lower), None)

    def metric_of(self, result: Result) -> tuple[str, float | None]:
        """Return the metric that trials are compared by, and its value; None if it is not known."""
        metrics = self.plan.metrics
        values = result.metrics or {}
        name = next((name for name in metrics if name in values), metrics[0])
        return name, values.get(name)

    def tell(self, trial: Trial, rung: int, result: Result) -> None:
        """Tell Optuna what came of a trial, if it failed or this is its last rung."""
        value = self.metric_of(result)[1]
        if result.error or value is None:
            self.study.tell(trial.number - 1, state=TrialState.FAIL, skip_if_finished=True)
        elif rung + 1 == len(self.plan.rungs):
            self.study.tell(trial.number - 1, value, skip_if_finished=True)

    def prune(self, trial: Trial) -> None:
        """Tell Optuna that a trial is not trained further."""
        self.study.tell(trial.number - 1, state=TrialState.PRUNED, skip_if_finished=True)

    def ranked(self, rung: int | None = None) -> list[Row]:
        """Return the trials that have a result of a rung, or their last one, the best first."""
        rungs = range(len(self.plan.rungs)) if rung is None else [rung]
        rows = {
            trial.number: Row(trial, each, result, *self.metric_of(result))
            for each in rungs
            for trial in self.trials
            if (result := trial.result(each)) is not None
        }
        return sorted(rows.values(), key=Row.order)

    def leaderboard(self) -> dict[str, Any]:
        """Return the leaderboard as `packs sweep --json` prints it."""
        plan, rows = self.plan, self.ranked()
        metric = rows[0].metric if rows else plan.metrics[0]
        has_best = bool(rows) and rows[0].status == "ok"
        return {
            "sweep": str(plan.folder),
            "name": plan.name,
            "search": plan.config.search,
            "metric": metric,
            "lower_is_better": is_lower_better(metric),
            "trials": self.count,
            "rungs": len(plan.rungs),
            "axes": {
                key: {"values": getattr(d, "choices", None), "log": getattr(d, "log", False)}
                for key, d in plan.space.items()
            },
            "best": str(rows[0].trial.pack) if has_best else None,
            "rows": [
                {
                    "place": place,
                    "trial": row.trial.number,
                    "values": row.trial.values,
                    metric: row.value,
                    "status": row.status,
                    "rung": row.rung,
                    "pack": None if row.result.error else str(row.trial.pack),
                    **{k: v for k, v in vars(row.result).items() if k != "error"},
                }
                for place, row in enumerate(rows, 1)
            ],
        }


def running(space: Space, values: Values) -> FrozenTrial:
    """Return a trial of Optuna with these values.

    Raises:
        ValueError: they are not in the space.
    """
    return create_trial(state=TrialState.RUNNING, params=values, distributions=space)
