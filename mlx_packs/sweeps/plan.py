"""The plan of a sweep: its section and every trial that is known, checked before one is trained."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..bases.files import check_files, resolve_checkpoint
from ..config.choices import SEARCHES
from ..config.recipe import Recipe, check_data_named
from ..config.values import setting_error, typed_value
from ..errors import PackError, did_you_mean
from ..tasks.phases import check_overridden, resolve_phases
from .space import (
    Space,
    SweepConfig,
    Values,
    corners,
    parse_space,
    planned_values,
    rungs_of,
    with_values,
)
from .trial import metrics_of

SECTION = "sweep"  # of a recipe
# Keys that a trial cannot choose.
_OF_SWEEP = ("out", "adapter_path", "resume", "overwrite", "seeds")
_CORNERS = 64  # at most, of a space whose trials are not known yet
_LENGTHS = ("iters", "epochs", "time", "phases")  # settings by which trials differ in length


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
    rungs: tuple[int | None, ...]  # batches at the end of each; None is the end of the run
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
        _check_key(key, config, where)

    values = planned_values(config, space, where)
    recipes = [_recipe(recipe, v, where, recipe_of) for v in values or corners(space, _CORNERS)]
    metrics = _metrics(config, recipes, where)
    _check_length(config, recipes[0], where)
    _check_inputs(recipes)

    return Plan(
        name=Path(where).stem,
        folder=folder,
        config=config,
        space=space,
        values=values,
        recipe_of=lambda own: _recipe(recipe, own, where, recipe_of),
        recipe=recipes[0],
        rungs=rungs_of(config, recipes[0].train.iters),
        metrics=metrics,
    )


def _check_key(key: str, config: SweepConfig, where: str) -> None:
    place = f"sweep.parameters.{key}"
    first = key.partition(".")[0]
    if first in _OF_SWEEP:
        raise setting_error("is chosen by the sweep. Leave it out.", place, where, "conflict")
    if SEARCHES[config.search].halves and first in _LENGTHS:
        text = "makes trials differ in length, which halving compares. Use search random."
        raise setting_error(text, place, where, "conflict")


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
        text = error.message.removeprefix(f"{where}: ")
        names = {key.rpartition(".")[2] for key in values} | {key.split(".")[0] for key in values}
        place = f"{where}: "
        if error.flag in names or any(key in text for key in values):
            shown = ", ".join(f"{key}={value}" for key, value in values.items())
            place += f"sweep.parameters ({shown}): "
        raise PackError(place + text, error.code, error.flag) from None

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


def _check_length(config: SweepConfig, recipe: Recipe, where: str) -> None:
    if not SEARCHES[config.search].halves:
        return

    train = recipe.train
    if named := train.changed(("epochs", "time", "phases")):
        text = "does not go with search halving, which counts batches. Give iters."
        raise setting_error(text, named[0], where, "conflict")
    if config.min_iters is not None and config.min_iters > train.iters:
        text = f"is {config.min_iters}, but trials have {train.iters} batches (iters). Lower it."
        raise setting_error(text, "sweep.min_iters", where)


def _check_inputs(recipes: list[Recipe]) -> None:
    """Check that every base and every data set of the trials is there and can be read."""
    bases = set()
    data = []
    for recipe in recipes:
        if recipe.model not in bases:
            bases.add(recipe.model)
            check_files(resolve_checkpoint(recipe.model))
        for phase in resolve_phases(recipe.train, recipe.data):
            if phase.sources not in data:
                data.append(phase.sources)
                phase.load_rows()
