"""A sweep: its trials, checked before the first one starts, in a folder that remembers them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..bases.files import check_files, resolve_checkpoint
from ..config.parse import build, setting_error, typed_value
from ..config.recipe import Recipe, check_data_named
from ..errors import PackError, did_you_mean
from ..files import atomic_write, make_folder, to_json
from ..hashes import sealed, without_seal
from ..reading import read_json
from ..training.phases import check_overridden, resolve_phases
from .metrics import METRICS
from .parameters import Parameter, parse_parameters, with_values
from .searches import SEARCHES, Rungs, SweepConfig, Values, rungs_of, trial_values
from .trial import Trial

SECTION = "sweep"  # of a recipe
_FILE = "sweep.json"
_FORMAT = "mlx_packs sweep 1"
_OF_SWEEP = ("out", "adapter_path", "resume", "overwrite")  # keys that a trial cannot choose
_LENGTHS = ("iters", "epochs", "time", "phases")  # settings by which trials differ in length

Resolver = Callable[[dict], Recipe]  # settings of a file to a recipe, with the defaults of its base


@dataclass(frozen=True)
class Sweep:
    """The trials of a sweep and how they are compared.

    Attributes:
        name: of the sweep, for people.
        folder: for everything that it writes.
        config: the section ``sweep`` of the recipe.
        parameters: by key of the recipe.
        trials: numbered from 1, in the order in which they start.
        rungs: of successive halving; one rung to the end for all other searches.
        metrics: names of the metric; the first that a trial has counts.
    """

    name: str
    folder: Path
    config: SweepConfig
    parameters: Mapping[str, Parameter]
    trials: list[Trial]
    rungs: Rungs
    metrics: tuple[str, ...]


def plan_sweep(settings: Mapping, where: str, folder: Path, recipe_of: Resolver) -> Sweep:
    """Return a sweep, every trial of which is checked; nothing is written or trained.

    Args:
        settings: of a recipe file, with the section ``sweep``.
        where: the file.
        folder: for everything that the sweep writes.
        recipe_of: returns the recipe of settings.

    Raises:
        PackError: a key or a value is wrong, of the sweep or of one of its trials.
    """
    recipe = {key: value for key, value in settings.items() if key != SECTION}
    section = typed_value(settings.get(SECTION), dict, SECTION, where)
    for key in ("resume", "overwrite"):
        if recipe.get(key):
            raise setting_error("is not for a sweep. Leave it out.", key, where, "conflict")
    config = build(SweepConfig, section, f"{where}: {SECTION}")
    parameters = parse_parameters(config.parameters, where)
    for key in parameters:
        _check_key(key, config, where)
    drawn = trial_values(config, parameters, where)
    recipes = [_recipe(recipe, values, where, recipe_of) for values in drawn]
    metrics = _metrics(config, recipes, where)
    rungs = rungs_of(config, _length(config, recipes, where))
    _check_inputs(recipes)
    trials = [
        Trial(number, values, each.to_json(), folder / "trials" / f"{number:03d}")
        for number, (values, each) in enumerate(zip(drawn, recipes, strict=True), 1)
    ]
    return Sweep(Path(where).stem, folder, config, parameters, trials, rungs, metrics)


def _check_key(key: str, config: SweepConfig, where: str) -> None:
    """Raise a PackError for a key that a trial cannot choose."""
    place, first = f"sweep.parameters.{key}", key.partition(".")[0]
    if first in _OF_SWEEP:
        raise setting_error("is chosen by the sweep. Leave it out.", place, where, "conflict")
    if SEARCHES[config.search].halves and first in _LENGTHS:
        text = "makes trials differ in length, which halving compares. Use search random."
        raise setting_error(text, place, where, "conflict")


def _recipe(recipe: Mapping, values: Values, where: str, recipe_of: Resolver) -> Recipe:
    """Return the recipe of a trial; errors name the file, and the parameters where they cause it."""
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
    """Return the metrics that trials are compared by: the one that is named, or those of the task."""
    tasks = list(dict.fromkeys(recipe.train.tasks[-1] for recipe in recipes))
    common = [name for name in METRICS[tasks[0]] if all(name in METRICS[task] for task in tasks)]
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


def _length(config: SweepConfig, recipes: list[Recipe], where: str) -> int:
    """Return the batches of every trial's run; of halving, which needs them, checked."""
    train = recipes[0].train
    if SEARCHES[config.search].halves:
        if named := train.changed(("epochs", "time", "phases")):
            text = "does not go with search halving, which counts batches. Give iters."
            raise setting_error(text, named[0], where, "conflict")
        if config.min_iters is not None and config.min_iters > train.iters:
            text = (
                f"is {config.min_iters}, but trials have {train.iters} batches (iters). Lower it."
            )
            raise setting_error(text, "sweep.min_iters", where)
    return train.iters


def _check_inputs(recipes: list[Recipe]) -> None:
    """Check that every base and every data set of the trials is there and can be read."""
    bases, data = set(), []
    for recipe in recipes:
        if recipe.model not in bases:
            bases.add(recipe.model)
            check_files(resolve_checkpoint(recipe.model))
        for phase in resolve_phases(recipe.train, recipe.data):
            if phase.sources not in data:
                data.append(phase.sources)
                phase.load_rows()


def begin(sweep: Sweep) -> bool:
    """Write which sweep a folder is for; return whether it had begun before.

    Raises:
        PackError: the folder is that of another sweep, or something else.
    """
    file = sweep.folder / _FILE
    identity = {
        "format": _FORMAT,
        **{key: getattr(sweep.config, key) for key in ("search", "seed")},
        "rungs": list(sweep.rungs.batches),
        "trials": [{"values": trial.values, "recipe": trial.recipe} for trial in sweep.trials],
    }
    identity = without_seal(sealed(identity))  # as it will be read
    if file.is_file():
        before = without_seal(read_json(file))
        if before == identity:
            return True
        key = next((k for k in identity if before.get(k) != identity[k]), "format")
        raise PackError(
            f"--out {sweep.folder}: has another sweep, whose {key} differ{'s' * (key[-1] != 's')}. "
            "Choose another --out, or remove that folder.",
            "exists",
        )
    if sweep.folder.exists() and (not sweep.folder.is_dir() or any(sweep.folder.iterdir())):
        raise PackError(
            f"--out {sweep.folder}: already exists and is not a sweep. Choose another --out.",
            "exists",
        )
    make_folder(sweep.folder)
    atomic_write(file, to_json(sealed(identity)))
    return False
