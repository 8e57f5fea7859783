"""A sweep in its folder: its trials in a study of Optuna, their training, and their results."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState, create_trial

from ..config.choices import SEARCHES, is_lower_better
from ..config.other_names import without_removed
from ..config.recipe import resolve
from ..display import Display, clock
from ..errors import PackError, library_errors
from ..files import atomic_write, make_folder, to_json
from ..gates import MEANING
from ..reading import read_json, sealed, without_seal
from .leaderboard import value_text, write_leaderboard
from .plan import Plan, Space, Values, draws
from .trial import Result, Trial, train, write_result

_FILE = "sweep.json"
_STUDY = "study.jsonl"
_FORMAT = "mlx_packs sweep 2"


@dataclass(frozen=True)
class RankedTrial:
    """A trial with its result, and the metric that it is compared by."""

    trial: Trial
    result: Result
    metric: str
    value: float | None

    @property
    def status(self) -> str:
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
        folder = self.plan.folder / "trials"
        # by their values, which no two trials share: a file that was copied twice has each again
        values = {to_json(each.params): each.params for each in self.study.get_trials(False)}
        return [
            Trial(number, params, folder / f"{number:03d}")
            for number, params in enumerate(values.values(), 1)
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
            self.study.add_trial(_running(self.plan.space, values))
            yield self.trials[-1]

    def _draw(self) -> Values | None:
        """Return values for the next trial. Packs that fail a gate count as infeasible."""
        earlier = self.study.get_trials()
        for trial, known in zip(self.trials, earlier, strict=False):
            result = trial.result
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

    def tell(self, trial: Trial, result: Result) -> None:
        """Tell Optuna what came of a trial."""
        value = self.metric_of(result)[1]
        if result.error or value is None:
            self.study.tell(trial.number - 1, state=TrialState.FAIL, skip_if_finished=True)
        else:
            self.study.tell(trial.number - 1, value, skip_if_finished=True)

    def ranked(self) -> list[RankedTrial]:
        """Return the trials that have a result, the best first."""
        rows = [
            RankedTrial(trial, result, *self.metric_of(result))
            for trial in self.trials
            if (result := trial.result) is not None
        ]
        return sorted(rows, key=RankedTrial.order)

    def leaderboard(self) -> dict[str, Any]:
        """Return the leaderboard as `packs sweep --json` prints it."""
        plan = self.plan
        rows = self.ranked()
        metric = plan.metrics[0]
        best = None
        if rows:
            metric = rows[0].metric
            if rows[0].status == "ok":
                best = str(rows[0].trial.pack)

        return {
            "sweep": str(plan.folder),
            "name": plan.name,
            "search": plan.config.search,
            "metric": metric,
            "lower_is_better": is_lower_better(metric),
            "trials": self.count,
            "axes": {
                key: {"values": getattr(d, "choices", None), "log": getattr(d, "log", False)}
                for key, d in plan.space.items()
            },
            "best": best,
            "rows": [
                {
                    "place": place,
                    "trial": row.trial.number,
                    "values": row.trial.values,
                    metric: row.value,
                    "status": row.status,
                    "pack": None if row.result.error else str(row.trial.pack),
                    **{k: v for k, v in vars(row.result).items() if k != "error"},
                }
                for place, row in enumerate(rows, 1)
            ],
        }


def _running(space: Space, values: Values) -> FrozenTrial:
    """Return a trial of Optuna with these values; a ValueError unless they are in the space."""
    return create_trial(state=TrialState.RUNNING, params=values, distributions=space)


def begin(plan: Plan) -> tuple[Sweep, bool]:
    """Return the sweep in a plan's folder, and whether it had begun; a PackError for another."""
    file = plan.folder / _FILE
    if continues := file.is_file():
        _check_same(plan, without_seal(read_json(file)))
    elif plan.folder.exists() and (not plan.folder.is_dir() or any(plan.folder.iterdir())):
        text = "already exists and is not a sweep. Choose another --out."
        raise PackError(f"--out {plan.folder}: {text}", "exists")
    else:
        make_folder(plan.folder)
        atomic_write(file, to_json(sealed(_identity(plan))))

    study = plan.folder / _STUDY
    with library_errors(lambda reason: _damaged(study, reason)):
        sweep = Sweep(plan, _open(study, is_lower_better(plan.metrics[0])))
        for each in plan.values[len(sweep.trials) :]:
            sweep.study.add_trial(_running(plan.space, each))

    return sweep, continues


def _identity(plan: Plan) -> dict[str, Any]:
    config = plan.config
    return {
        "format": _FORMAT,
        **{key: getattr(config, key) for key in ("search", "seed", "trials", "parameters")},
        "metric": plan.metrics[0] if SEARCHES[config.search].learns else None,
        "recipe": plan.recipe.to_json(),
    }


def _check_same(plan: Plan, before: dict[str, Any]) -> None:
    """Raise a PackError unless the sweep that a folder has is the plan's.

    Settings that its recipe lacks, since they are newer, have their defaults.
    """
    if isinstance(recipe := before.get("recipe"), dict):
        before = {**before, "recipe": resolve(without_removed(recipe)).to_json()}

    before = without_seal(sealed(before))
    before.pop("rungs", None)  # written while a search could end worse trials early
    now = without_seal(sealed(_identity(plan)))  # as it will be read
    if differs := [key for key in before if before[key] != now.get(key)]:
        key = differs[0]
        verb = "differ" if key.endswith("s") else "differs"
        raise PackError(
            f"--out {plan.folder}: has another sweep, whose {key} {verb}. "
            "Choose another --out, or remove that folder.",
            "exists",
        )


def _open(file: Path, lower: bool) -> Study:
    """Return the study in a file, or a new one. Only this process writes it."""
    file.with_name(f"{file.name}.lock").unlink(missing_ok=True)  # of a process that was killed
    if file.is_file():
        with file.open("r+b") as journal:  # without the line that it was writing
            journal.truncate(journal.read().rfind(b"\n") + 1)

    return optuna.create_study(
        storage=JournalStorage(JournalFileBackend(str(file))),
        study_name="sweep",
        direction="minimize" if lower else "maximize",
        load_if_exists=True,
    )


def _damaged(file: Path, reason: str) -> PackError:
    text = f"is damaged ({reason}). Remove it; trials that are over are not repeated."
    return PackError(f"{file}: {text}", "unreadable")


def train_trials(sweep: Sweep, display: Display) -> None:
    """Train the trials that have no result, one after another.

    The leaderboard is written after each trial, so that it can be read meanwhile.
    """
    count = 0
    for trial in sweep.to_train():
        count += 1
        if (result := trial.result) is not None:  # of an earlier command
            sweep.tell(trial, result)
            continue

        values = ", ".join(f"{key}={value_text(value)}" for key, value in trial.values.items())
        with display.working("trial", f"{trial.number} · {values}"):
            result = _result_of(sweep, trial)
        sweep.tell(trial, result)
        text = f"{trial.number}/{sweep.count} · {values} · {_described(sweep, result)}"
        display.line("trial", text)
        write_leaderboard(sweep.plan.folder, sweep.leaderboard())

    if count < sweep.count:
        display.line("sweep", f"{count} of {sweep.count} trials: no new values were found")
    write_leaderboard(sweep.plan.folder, sweep.leaderboard())


def _result_of(sweep: Sweep, trial: Trial) -> Result:
    try:
        recipe = sweep.plan.recipe_of(trial.values).to_json()
    except PackError as error:  # of values that were drawn after the sweep was checked
        return write_result(trial, Result(error=error.message))
    return train(trial, recipe)


def _described(sweep: Sweep, result: Result) -> str:
    name, value = sweep.metric_of(result)
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
