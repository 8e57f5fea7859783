"""The plan of a sweep: its section and the values of every trial, checked before one is trained."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..bases.files import check_files, resolve_checkpoint
from ..config.choices import SEARCHES
from ..config.fields import Fault, Settings, option
from ..config.recipe import Recipe, check_named
from ..config.values import setting_error, typed_value
from ..errors import PackError, did_you_mean
from ..tasks.phases import check_overridden, resolve_phases
from .trial import Result, Trial, metrics_of

MOST_TRIALS = 10_000
_ATTEMPTS = 100  # at drawing values that no trial has yet, for each trial

Values = dict[str, Any]  # of a trial, by key of the recipe
_key = partial(option, section="Optimization", flags=())


@dataclass(frozen=True, repr=False)
class SweepConfig(Settings):
    """The section ``sweep`` of a recipe."""

    search: str = _key("grid", "How values are chosen.", choices=SEARCHES)
    trials: int | None = _key(None, "Number of trials.", at_least=1, at_most=MOST_TRIALS)
    seed: int = _key(0, "Random seed of the values.", at_least=0, below=2**32)
    metric: str | None = _key(None, "Held-out metric that trials are compared by.")
    parameters: dict = _key({}, "Values by key of the recipe.")

    def _conflicts(self) -> Iterator[Fault]:
        if self.search == "random" and self.trials is None:
            yield Fault("trials", "is required with search random. Give a number.")
        if self.search == "grid" and self.trials is not None:
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


@dataclass(frozen=True)
class Numbers:
    """Numbers of a range, both ends included: integers if the ends are integers."""

    low: float
    high: float
    is_log: bool  # whether logarithms are drawn

    def draw(self, random: np.random.Generator) -> float:
        """Return a number; a float has four digits, so that a table shows it in full."""
        is_integer = isinstance(self.low, int) and isinstance(self.high, int)
        # half of the way to the next integers, so that the ends are as likely as the others
        margin = 0.5 if is_integer else 0.0
        ends = (self.low - margin, self.high + margin)

        number = random.uniform(*ends)
        if self.is_log:
            number = math.exp(random.uniform(*map(math.log, ends)))
        number = round(number) if is_integer else float(f"{number:.4g}")
        return min(max(number, self.low), self.high)


Space = dict[str, list | Numbers]  # by key of the recipe


def parse_space(parameters: Mapping, where: str) -> Space:
    """Return the parameters of a sweep by key of the recipe, such as ``rank_pattern.v_proj``.

    Each is a list of values, or a mapping with ``min``, ``max`` and perhaps ``scale``. A PackError
    if there is none, or one has no values, values twice, or a range without numbers.
    """
    if not parameters:
        text = "names no key of the recipe. Give at least one, such as `rank: [8, 16]`."
        raise setting_error(text, "sweep.parameters", where)
    return {str(k): _values_of(v, f"sweep.parameters.{k}", where) for k, v in parameters.items()}


def _values_of(values: Any, key: str, where: str) -> list | Numbers:
    if isinstance(values, Mapping):
        ends = Range.from_mapping(values, f"{where}: {key}")
        low = values["min"]
        high = values["max"]
        if type(low) is int and type(high) is int:
            return Numbers(low, high, ends.scale == "log")
        return Numbers(ends.min, ends.max, ends.scale == "log")

    if not isinstance(values, list):
        text = f"must be a list of values, or {{min: …, max: …}}, but is {values!r}."
        raise setting_error(text, key, where)
    if not values:
        raise setting_error("has no values. List at least one.", key, where)
    if twice := [v for i, v in enumerate(values) if v in values[:i]]:
        raise setting_error(f"lists {twice[0]!r} twice. List it once.", key, where)
    return values


def planned_values(config: SweepConfig, space: Space, where: str) -> list[Values]:
    """Return the values of all trials; no two are equal, and the same seed gives the same ones.

    Random search: https://jmlr.org/papers/v13/bergstra12a.html

    Raises:
        PackError: a grid has a range or is too large, or there are fewer combinations than trials.
    """
    ranges = [key for key, values in space.items() if isinstance(values, Numbers)]
    combinations = math.inf
    if not ranges:
        combinations = math.prod(map(len, space.values()))

    if config.search == "grid":
        if ranges:
            text = "is a range, which a grid cannot go through. List values, or use search random."
            raise setting_error(text, f"sweep.parameters.{ranges[0]}", where, "conflict")
        if combinations > MOST_TRIALS:
            text = f"the grid has {combinations:,} trials, more than {MOST_TRIALS:,}."
            raise setting_error(f"{text} Use search random.", "sweep.parameters", where)
        return [dict(zip(space, row, strict=True)) for row in itertools.product(*space.values())]

    if combinations < config.trials:
        text = (
            f"is {config.trials}, but there are only {combinations} combinations. Use search grid."
        )
        raise setting_error(text, "sweep.trials", where)
    return _drawn(config, space, where)


def _drawn(config: SweepConfig, space: Space, where: str) -> list[Values]:
    """Return different values at random, as many as ``trials``."""
    random = np.random.default_rng(config.seed)
    trials: list[Values] = []
    for _ in range(_ATTEMPTS * config.trials):
        drawn = {key: _draw(values, random) for key, values in space.items()}
        if drawn not in trials:
            trials.append(drawn)
        if len(trials) == config.trials:
            return trials

    text = f"is {config.trials}, but only {len(trials)} different trials were drawn."
    raise setting_error(f"{text} Widen a parameter.", "sweep.trials", where)


def _draw(values: list | Numbers, random: np.random.Generator) -> Any:
    if isinstance(values, Numbers):
        return values.draw(random)
    return values[random.integers(len(values))]


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


@dataclass(frozen=True)
class Sweep:
    """A sweep that was checked."""

    folder: Path  # for everything that it writes
    config: SweepConfig
    space: Space
    trials: list[Trial]
    recipes: list[Recipe]  # of the trials
    metrics: tuple[str, ...]  # the first that a trial has counts

    def metric_of(self, result: Result) -> tuple[str, float | None]:
        """Return the metric that trials are compared by, and its value; None if it is not known."""
        values = result.metrics or {}
        name = next((name for name in self.metrics if name in values), self.metrics[0])
        return name, values.get(name)


def plan_sweep(
    settings: Mapping, where: str, folder: Path, recipe_of: Callable[[dict], Recipe]
) -> Sweep:
    """Return a sweep that was checked; nothing is written or trained.

    ``settings`` is the recipe file ``where`` with its section ``sweep``; ``recipe_of`` returns the
    recipe of a file's settings, with the defaults of its base; all files of the sweep go into
    ``folder``. A PackError if a key or a value is wrong, of the sweep or of one of its trials.
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
    recipes = [_recipe(recipe, v, where, recipe_of) for v in values]
    metrics = _metrics(config, recipes, where)
    _check_inputs(recipes)

    trials = [Trial(i, v, folder / "trials" / f"{i:03d}") for i, v in enumerate(values, 1)]
    return Sweep(folder, config, space, trials, recipes, metrics)


def _recipe(
    recipe: Mapping, values: Values, where: str, recipe_of: Callable[[dict], Recipe]
) -> Recipe:
    """Return the recipe of a trial; errors name the file, and the parameters if they cause it."""
    settings = with_values(recipe, values)

    try:
        resolved = recipe_of(settings)
        check_overridden(resolved.train, resolved.specified)
        check_named(resolved)
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
