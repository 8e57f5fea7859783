"""The recipe of a run from flags and files of the command line."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..config.choices import TASKS
from ..config.external import translate
from ..config.lora import LoRAConfig
from ..config.parse import read_settings
from ..config.recipe import Recipe, RunOptions, check_method, resolve, specified, tiny_recipe
from ..errors import PackError

_RUN = ("adapter_path", *(f.name for f in dataclasses.fields(RunOptions)))


def read_recipes(files: Sequence[str], flags: Mapping | None = None) -> dict:
    """Return the settings in recipe files; later ones override earlier ones.

    Raises:
        PackError: a fault of a file, by its name, unless the other files or ``flags`` correct it.
    """
    settings: dict = {}
    fault = None
    for file in files:
        own = translate(read_settings(file), file)
        try:
            resolve(own, file)
        except PackError as error:
            fault = fault or error
        settings |= own
    if fault is not None:
        try:
            resolve(flags or {}, under=[settings])
        except PackError:
            raise fault from None
    return settings


def recipe_of(flags: dict, settings: dict) -> Recipe:
    """Flags over the settings of files, over the recipe of the run to resume or the base's defaults."""
    lowest, settings, resumed = _defaults(flags, settings)
    recipe = resolve(flags, under=[lowest, settings])
    if recipe.train.trains_base:  # the tiny base's defaults for adapters do not count
        own = recipe if resumed else resolve(flags, under=[settings])
        check_method(own.lora, recipe.train, specified(settings, flags))
        lora = LoRAConfig(num_layers=recipe.lora.num_layers)
        recipe = dataclasses.replace(recipe, lora=lora)
    return recipe


def _defaults(flags: dict, settings: dict) -> tuple[dict, dict, bool]:
    """Return the settings below flags and files, those of files, and whether a run is resumed."""
    from ..bases.files import TINY
    from ..training.run_folder import CONFIG, check_resumable, run_folder

    # only what is no setting of training: a flag may need what the run to resume has
    above, below = ({k: v for k, v in layer.items() if k in _RUN} for layer in (flags, settings))
    run = resolve(above, under=[below]).run
    if run.get("resume") and "out" in run:
        folder = run_folder(Path(run["out"]).expanduser())
        lowest = dict(check_resumable(folder)["recipe"])
        lowest.pop("resume_adapter_file", None)  # a name and a hash: the run has begun
        resolve(lowest, str(folder / CONFIG))
        return lowest, {k: v for k, v in settings.items() if k != "resume_adapter_file"}, True
    lowest = tiny_recipe() if run.get("model", TINY) == TINY else {}
    task = TASKS[resolve(flags, under=[settings]).train.task]
    return dict(task.defaults) or lowest, settings, False
