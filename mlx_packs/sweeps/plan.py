"""The plan of a sweep: its section and every trial that is known, checked before one is trained.

The space of a sweep is Optuna's distributions, by key of the recipe.
"""

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.samplers import RandomSampler, TPESampler
from optuna.trial import FrozenTrial

from ..bases.files import check_files, resolve_checkpoint
from ..config.choices import SEARCHES
from ..config.fields import Fault, Settings, option
from ..config.recipe import Recipe, check_data_named
from ..config.values import setting_error, typed_value
from ..errors import PackError, did_you_mean
from ..tasks.phases import check_overridden, resolve_phases
from .trial import metrics_of

MOST_TRIALS = 10_000
_ATTEMPTS = 100  # at drawing values that no trial has yet, for each trial

Space = dict[str, BaseDistribution]  # by key of the recipe
Values = dict[str, Any]  # of a trial, by key of the recipe

optuna.logging.set_verbosity(optuna.logging.WARNING)  # else every study is announced
# Lists and mappings are choices too; they are stored as JSON and found by their place.
warnings.filterwarnings("ignore", "Choices for a categorical distribution")


_key = partial(option, section="Optimization", flags=())


@dataclass(frozen=True, repr=False)
class SweepConfig(Settings):
    """The section ``sweep`` of a recipe."""

    search: str = _key("grid", "How values are chosen.", choices=tuple(SEARCHES))
    trials: int | None = _key(None, "Number of trials.", at_least=1, at_most=MOST_TRIALS)
    seed: int = _key(0, "Random seed of the values.", at_least=0, below=2**32)
    metric: str | None = _key(None, "Held-out metric that trials are compared by.")
    parameters: dict = _key({}, "Values by key of the recipe.")

    def _conflicts(self) -> Iterator[Fault]:
        search = SEARCHES.get(self.search)
        if search is None:
            return  # a fault of its own

        if search.draws and self.trials is None:
            yield Fault("trials", f"is required with search {self.search}. Give a number.")
        if not search.draws and self.trials is not None:
            text = "a grid has as many trials as combinations. Leave it out, or use search random."
            yield Fault("trials", text, "conflict")


@dataclass(frozen=True, repr=False)
class Range(Settings):
    """A range of numbers as the values of a parameter; both ends are included."""

    min: float | None = _key(None, "The least number.")
    max: float | None = _key(None, "The greatest number.")
    scale: str = _key("linear", "Whether logarithms are drawn.", choices=("linear", "log"))

    def _conflicts(self) -> Iterator[Fault]:
        if self.min is None or self.max is None:
            missing = "min" if self.min is None else "max"
            yield Fault(missing, "is missing. Give min and max.")
        elif not self.min < self.max:
            yield Fault("min", f"is {self.min:g}, which must be less than max, {self.max:g}.")
        elif self.scale == "log" and self.min <= 0:
            text = f"must be above 0 with scale log, but is {self.min:g}. Raise it."
            yield Fault("min", text)


def parse_space(parameters: Mapping, where: str) -> Space:
    """Return the parameters of a sweep by key of the recipe, such as ``rank_pattern.v_proj``.

    Each is a list of values, or a mapping with ``min``, ``max`` and perhaps ``scale``. A PackError
    if there is none, or one has no values, values twice, or a range without numbers.
    """
    if not parameters:
        text = "names no key of the recipe. Give at least one, such as `rank: [8, 16]`."
        raise setting_error(text, "sweep.parameters", where)
    return {str(k): _distribution(v, f"sweep.parameters.{k}", where) for k, v in parameters.items()}


def _distribution(values: Any, key: str, where: str) -> BaseDistribution:
    if isinstance(values, Mapping):
        ends = Range.from_mapping(values, f"{where}: {key}")
        low = values["min"]
        high = values["max"]
        is_log = ends.scale == "log"
        if type(low) is int and type(high) is int:
            return IntDistribution(low, high, log=is_log)
        return FloatDistribution(ends.min, ends.max, log=is_log)

    if not isinstance(values, list):
        text = f"must be a list of values, or {{min: …, max: …}}, but is {values!r}."
        raise setting_error(text, key, where)
    if not values:
        raise setting_error("has no values. List at least one.", key, where)
    if twice := [v for i, v in enumerate(values) if v in values[:i]]:
        raise setting_error(f"lists {twice[0]!r} twice. List it once.", key, where)
    return CategoricalDistribution(values)


def listed(distribution: BaseDistribution) -> tuple[Any, ...] | None:
    """Return all values of a list; None of a range."""
    return getattr(distribution, "choices", None)


def planned_values(config: SweepConfig, space: Space, where: str) -> list[Values]:
    """Return the values of all trials that are known before the first one is trained.

    No two are equal, and the same seed gives the same ones. A search that learns has none yet.
    Random search: https://jmlr.org/papers/v13/bergstra12a.html

    Raises:
        PackError: a grid has a range or is too large, or there are fewer combinations than trials.
    """
    search = SEARCHES[config.search]
    combinations = math.prod(len(listed(d) or ()) or math.inf for d in space.values())

    if not search.draws:
        if ranged := [key for key, distribution in space.items() if listed(distribution) is None]:
            text = "is a range, which a grid cannot go through. List values, or use search random."
            raise setting_error(text, f"sweep.parameters.{ranged[0]}", where, "conflict")
        if combinations > MOST_TRIALS:
            text = f"the grid has {combinations:,} trials, more than {MOST_TRIALS:,}."
            raise setting_error(f"{text} Use search random.", "sweep.parameters", where)
        return corners(space)

    trials = config.trials or 0
    if combinations < trials:
        text = f"is {trials}, but there are only {combinations:.0f} combinations. Use search grid."
        raise setting_error(text, "sweep.trials", where)

    if search.learns:
        return []
    values = list(itertools.islice(draws(config, space, [], trials), trials))
    if len(values) < trials:
        text = f"is {trials}, but only {len(values)} different trials were drawn."
        raise setting_error(f"{text} Widen a parameter.", "sweep.trials", where)
    return values


def corners(space: Space, most: int = MOST_TRIALS) -> list[Values]:
    """Return all combinations of listed values and ends of ranges.

    If they are more than ``most``, every value is there once, beside the first values of others.
    """
    ends = {key: listed(d) or (d.low, d.high) for key, d in space.items()}
    if math.prod(map(len, ends.values())) <= most:
        return [dict(zip(ends, row, strict=True)) for row in itertools.product(*ends.values())]

    first = {key: values[0] for key, values in ends.items()}
    return [{**first, key: value} for key, values in ends.items() for value in values]


def draws(
    config: SweepConfig,
    space: Space,
    earlier: Sequence[FrozenTrial],
    trials: int,
    lower: bool = True,
) -> Iterator[Values]:
    """Yield values that no trial has yet; the seed and the earlier trials determine them.

    Args:
        config: the section of the sweep.
        space: its parameters.
        earlier: trials that TPE learns from (https://papers.nips.cc/paper/4443).
        trials: number of values to draw.
        lower: whether less of the metric is better.
    """
    seed = int(np.random.SeedSequence([config.seed, len(earlier)]).generate_state(1)[0])
    sampler = TPESampler if SEARCHES[config.search].learns else RandomSampler
    direction = "minimize" if lower else "maximize"
    study = optuna.create_study(sampler=sampler(seed=seed), direction=direction)
    study.add_trials(earlier)
    seen = [trial.params for trial in earlier]

    for _ in range(_ATTEMPTS * trials):
        drawn = study.ask(space).params
        values = {key: _four_digits(value, space[key]) for key, value in drawn.items()}
        if values not in seen:
            seen.append(values)
            yield values


def _four_digits(value: Any, distribution: BaseDistribution) -> Any:
    """Return a float of a range with four digits, so that a table shows it in full."""
    if not isinstance(distribution, FloatDistribution):
        return value
    return min(max(float(f"{value:.4g}"), distribution.low), distribution.high)


def with_values(recipe: Mapping, values: Values) -> dict:
    """Return the settings of a recipe with other values; ``a.b`` is the key b of the mapping a."""
    changed = dict(recipe)
    for key, value in values.items():
        first, _, rest = key.partition(".")
        if rest:
            inner = changed.get(first)
            if not isinstance(inner, Mapping):
                inner = {}
            value = with_values(inner, {rest: value})
        changed[first] = value
    return changed


SECTION = "sweep"  # of a recipe
# Keys that a trial cannot choose.
_OF_SWEEP = ("out", "adapter_path", "resume", "overwrite", "seeds")
_CORNERS = 64  # at most, of a space whose trials are not known yet


@dataclass(frozen=True)
class Plan:
    """A sweep that was checked."""

    name: str  # for people
    folder: Path  # for everything that it writes
    config: SweepConfig
    space: Space
    values: list[Values]  # of the trials that are known before the first one is trained
    recipe_of: Callable[[Values], Recipe]  # of a trial; raises a PackError if there is none
    recipe: Recipe  # of the first trial or corner of the space
    metrics: tuple[str, ...]  # the first that a trial has counts


def plan_sweep(
    settings: Mapping, where: str, folder: Path, recipe_of: Callable[[dict], Recipe]
) -> Plan:
    """Return the plan of a sweep; nothing is written or trained.

    ``settings`` is the recipe file ``where`` with its section ``sweep``; ``recipe_of`` returns the
    recipe of a file's settings, with the defaults of its base; all files of the sweep go into
    ``folder``. A PackError if a key or a value is wrong, of the sweep, of one of its trials, or, if
    trials are not known yet, of a corner of the space.
    """
    recipe = {key: value for key, value in settings.items() if key != SECTION}
    section = typed_value(settings.get(SECTION), dict, SECTION, where)
    for key in ("resume", "overwrite", "seeds"):
        if recipe.get(key):
            raise setting_error("is not for a sweep. Leave it out.", key, where, "conflict")

    config = SweepConfig.from_mapping(section, f"{where}: {SECTION}")
    space = parse_space(config.parameters, where)
    for key in space:
        if key.partition(".")[0] in _OF_SWEEP:
            place = f"sweep.parameters.{key}"
            raise setting_error("is chosen by the sweep. Leave it out.", place, where, "conflict")

    values = planned_values(config, space, where)
    recipes = [_recipe(recipe, v, where, recipe_of) for v in values or corners(space, _CORNERS)]
    metrics = _metrics(config, recipes, where)
    _check_inputs(recipes)

    return Plan(
        name=Path(where).stem,
        folder=folder,
        config=config,
        space=space,
        values=values,
        recipe_of=lambda own: _recipe(recipe, own, where, recipe_of),
        recipe=recipes[0],
        metrics=metrics,
    )


def _recipe(
    recipe: Mapping, values: Values, where: str, recipe_of: Callable[[dict], Recipe]
) -> Recipe:
    """Return the recipe of a trial; errors name the file, and the parameters if they cause it."""
    settings = with_values(recipe, values)

    try:
        resolved = recipe_of(settings)
        check_overridden(resolved.train, resolved.specified)
        check_data_named(resolved)
        resolve_phases(resolved.train, resolved.data)
    except PackError as error:
        names = {key.rpartition(".")[2] for key in values} | {key.split(".")[0] for key in values}
        place = where
        if error.flag in names or any(key in error.text for key in values):
            shown = ", ".join(f"{key}={value}" for key, value in values.items())
            place += f": sweep.parameters ({shown})"
        raise PackError(error.text, error.code, error.flag, where=place) from None

    return resolved


def _metrics(config: SweepConfig, recipes: list[Recipe], where: str) -> tuple[str, ...]:
    """Return the metrics that trials are compared by: the named one, or all of the task."""
    tasks = list(dict.fromkeys(recipe.train.tasks[-1] for recipe in recipes))
    common = [
        name for name in metrics_of(tasks[0]) if all(name in metrics_of(task) for task in tasks)
    ]

    if not common:
        text = f"trials have the tasks {', '.join(tasks)}, which have no metric in common."
        raise setting_error(text, "sweep.parameters.task", where, "conflict")

    if config.metric is None:
        return tuple(common)
    if config.metric not in common:
        hint = did_you_mean(config.metric, common)
        text = f"'{config.metric}' is no metric of --task {tasks[0]}. {hint}"
        raise setting_error(text, "sweep.metric", where, "unknown")
    return (config.metric,)


def _check_inputs(recipes: list[Recipe]) -> None:
    """Check that every base and every data set of the trials is there and can be read."""
    bases = set()
    data = []
    for recipe in recipes:
        if recipe.model not in bases:
            bases.add(recipe.model)
            check_files(resolve_checkpoint(recipe.model))
        for phase in resolve_phases(recipe.train, recipe.data):
            if phase.columns not in data:
                data.append(phase.columns)
                phase.load_rows()
