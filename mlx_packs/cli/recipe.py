"""The recipe of a run from flags and files of the command line."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..config.external import translate
from ..config.fields import read_settings
from ..config.recipe import Recipe, RunOptions, check_method, merged, resolve, resolve_new
from ..errors import PackError
from ..files import exclusive_writer

if TYPE_CHECKING:
    from ..training.run_folder import RunFolder

_RUN = {f.name for f in dataclasses.fields(RunOptions)}


# Settings by the name of their file, which are not checked yet; later ones override earlier ones.
Files = Sequence[tuple[str, Mapping]]


def read_recipes(files: Sequence[str]) -> Files:
    """Return the settings in recipe files, with keys of other tools translated to ours."""
    return [(file, translate(read_settings(file), file)) for file in files]


def _settings(files: Files) -> dict:
    return {name: value for _, settings in files for name, value in settings.items()}


def recipe_of(flags: Mapping, files: Files = ()) -> Recipe:
    """Return the recipe of flags over files, over the run to resume or the defaults of the base.

    Raises:
        PackError: a setting is wrong. A fault of a file names it, unless another file or a flag
            corrects it.
    """
    try:
        recipe = _resolved(flags, _settings(files))
    except PackError as error:
        if error.code == "dependency":  # a package is at fault, not a file
            raise
        raise _fault_of_a_file(flags, files) or error from None

    check_method(recipe)
    return recipe


def _resolved(flags: Mapping, settings: Mapping) -> Recipe:
    from ..training.run_folder import CONFIG, RunFolder, run_folder, seed_runs

    specified = merged(settings, flags)
    run = RunOptions.from_mapping({k: v for k, v in specified.items() if k in _RUN})
    if not run.resume or run.out is None:
        return resolve_new(flags, under=[settings])

    # the run has begun, so that its first adapters are a name and a hash
    out = Path(run.out).expanduser()
    folder = run_folder(out)
    if run.seeds:
        folder = next(iter(seed_runs(out)), folder)
    earlier = dict(_identity(RunFolder(folder))["recipe"])
    settings = dict(settings)
    for layer in (earlier, settings):
        layer.pop("resume_adapter_file", None)

    try:
        return resolve(flags, under=[settings], defaults=earlier)
    except PackError:
        resolve(earlier, str(folder / CONFIG))  # raises if the fault is there
        raise


def _identity(run: "RunFolder") -> dict:
    """Return the identity of a run that is resumed, which no other process trains."""
    try:
        return run.check_resumable()
    except PackError:
        if not run.path.is_dir():
            raise
        busy = f"--resume: {run.path}: another process trains this run. Wait for it, or end it."
        with exclusive_writer(run.path, busy):
            raise


def _fault_of_a_file(flags: Mapping, files: Files) -> PackError | None:
    """Return the first fault of a file by itself; None if flags and other files correct it."""
    faults = [fault for file, values in files if (fault := _fault(values, file))]
    if faults and _fault(flags, under=[_settings(files)]):
        return faults[0]
    return None


def _fault(values: Mapping, where: str = "", under: Sequence[Mapping] = ()) -> PackError | None:
    try:
        resolve(values, where, under)
    except PackError as error:
        return error
    return None
