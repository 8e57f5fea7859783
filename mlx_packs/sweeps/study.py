"""The folder of a sweep: which sweep it is, and the study of Optuna."""

from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import Study

from ..config.choices import SEARCHES
from ..errors import PackError, library_errors
from ..files import atomic_write, make_folder, to_json
from ..hashes import sealed, without_seal
from ..reading import read_json
from .metrics import is_lower_better
from .plan import Plan
from .space import Values
from .sweep import Sweep, running

_FILE = "sweep.json"
_STUDY = "study.jsonl"
_FORMAT = "mlx_packs sweep 2"
_LISTED = "mlx_packs sweep 1"  # which lists the trials, and has no study


def begin(plan: Plan) -> tuple[Sweep, bool]:
    """Return the sweep in the folder of a plan, and whether it had begun before.

    Raises:
        PackError: the folder is that of another sweep, or something else.
    """
    file = plan.folder / _FILE
    values = plan.values
    if continues := file.is_file():
        values = _continued(plan, without_seal(read_json(file)))
    elif plan.folder.exists() and (not plan.folder.is_dir() or any(plan.folder.iterdir())):
        text = "already exists and is not a sweep. Choose another --out."
        raise PackError(f"--out {plan.folder}: {text}", "exists")
    else:
        make_folder(plan.folder)
        atomic_write(file, to_json(sealed(_identity(plan))))

    study = plan.folder / _STUDY
    with library_errors(lambda reason: _damaged(study, reason)):
        sweep = Sweep(plan, _open(study, is_lower_better(plan.metrics[0])))
        for each in values[len(sweep.trials) :]:
            sweep.study.add_trial(running(plan.space, each))
    return sweep, continues


def _identity(plan: Plan) -> dict[str, Any]:
    """Return what makes two sweeps the same one."""
    config = plan.config
    return {
        "format": _FORMAT,
        **{key: getattr(config, key) for key in ("search", "seed", "trials", "parameters")},
        "metric": plan.metrics[0] if SEARCHES[config.search].learns else None,
        "rungs": plan.rungs,
        "recipe": plan.recipe.to_json(),
    }


def _continued(plan: Plan, before: dict[str, Any]) -> list[Values]:
    """Return the values of the trials of a sweep that a folder has; it must be the plan's.

    A sweep of an older version lists its trials, whose values may be others than are drawn today.
    """
    now = _identity(plan)
    values = plan.values
    if before.get("format") == _LISTED:
        values = [trial["values"] for trial in before["trials"]]
        if len(values) != len(plan.values):
            raise _another(plan, "number of trials")
        try:
            optuna.create_study().add_trials(running(plan.space, own) for own in values)
        except (KeyError, ValueError):
            raise _another(plan, "parameters") from None
        trials = [{"values": v, "recipe": plan.recipe_of(v).to_json()} for v in values]
        now |= {"format": _LISTED, "trials": trials}

    now = without_seal(sealed(now))  # as it will be read
    if differs := [key for key in before if before[key] != now.get(key)]:
        raise _another(plan, differs[0])
    return values


def _another(plan: Plan, key: str) -> PackError:
    verb = "differ" if key.endswith("s") else "differs"
    return PackError(
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
