"""A sweep in its folder: which sweep it has, and the training of its trials."""

from typing import Any

from ..config.other_names import without_removed
from ..config.recipe import resolve
from ..display import Display
from ..errors import PackError
from ..files import atomic_write, make_folder, to_json
from ..reading import read_json, sealed, without_seal
from .leaderboard import RankedTrial, value_text, write_leaderboard
from .plan import Sweep
from .trial import train

_FILE = "sweep.json"
_FORMAT = "mlx_packs sweep 3"


def begin(sweep: Sweep) -> bool:
    """Let a folder have a sweep, and return whether it had begun; a PackError for another one."""
    file = sweep.folder / _FILE
    if file.is_file():
        _check_same(sweep, without_seal(read_json(file)))
        return True

    if sweep.folder.exists() and (not sweep.folder.is_dir() or any(sweep.folder.iterdir())):
        text = "already exists and is not a sweep. Choose another --out."
        raise PackError(f"--out {sweep.folder}: {text}", "exists")
    make_folder(sweep.folder)
    atomic_write(file, to_json(sealed(_identity(sweep))))
    return False


def _identity(sweep: Sweep) -> dict[str, Any]:
    config = sweep.config
    return {
        "format": _FORMAT,
        **{key: getattr(config, key) for key in ("search", "seed", "trials", "parameters")},
        "recipe": sweep.recipes[0].to_json(),
    }


def _check_same(sweep: Sweep, before: dict[str, Any]) -> None:
    """Raise a PackError unless the sweep that a folder has is this one.

    Settings that its recipe lacks, since they are newer, have their defaults.
    """
    if isinstance(recipe := before.get("recipe"), dict):
        before = {**before, "recipe": resolve(without_removed(recipe)).to_json()}

    before = without_seal(sealed(before))
    now = without_seal(sealed(_identity(sweep)))  # as it will be read
    if differs := [key for key in before if before[key] != now.get(key)]:
        key = differs[0]
        verb = "differ" if key.endswith("s") else "differs"
        raise PackError(
            f"--out {sweep.folder}: has another sweep, whose {key} {verb}. "
            "Choose another --out, or remove that folder.",
            "exists",
        )


def train_trials(sweep: Sweep, display: Display) -> None:
    """Train the trials that have no result, one after another.

    The leaderboard is written after each trial, so that it can be read meanwhile.
    """
    for trial, recipe in zip(sweep.trials, sweep.recipes, strict=True):
        if trial.result is not None:  # of an earlier command
            continue

        values = ", ".join(f"{key}={value_text(value)}" for key, value in trial.values.items())
        with display.working("trial", f"{trial.number} · {values}"):
            result = train(trial, recipe.to_json())
        ranked = RankedTrial(trial, result, *sweep.metric_of(result))
        place = f"{trial.number}/{len(sweep.trials)}"
        display.line("trial", f"{place} · {values} · {ranked.described}")
        write_leaderboard(sweep)

    write_leaderboard(sweep)
