"""The identity of a run: its recipe, base, data and date; a resumed run must be the same run."""

import json
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from ..bases.chat_template import reads_clock
from ..bases.files import public_name, resolve_checkpoint
from ..bases.fingerprint import changed_texts, fingerprint, text_hashes
from ..config.choices import METHODS, TASKS
from ..config.fields import fields_where
from ..config.optimizer import with_bias_correction
from ..config.recipe import Recipe
from ..config.schema import TrainConfig
from ..data import rows as rows_of
from ..data.teacher_cache import TeacherCache
from ..display import Display
from ..errors import PackError
from ..packs.base import Base
from .run_folder import PACKAGES, check_unchanged
from .settings import Run, RunSettings


def run_identity(recipe: Recipe, base: Base, run: Run, splits: Sequence[rows_of.Splits]) -> dict:
    """Return the recipe of a run, the fingerprints of its base and its data, and its own loss."""
    identity = {"recipe": recipe.to_json(), **packages_of(recipe.train)}
    if run.request.loss:
        identity["loss"] = run.request.calls.loss_name
    if (folder := recipe.train.teacher_cache) is not None:
        identity["teacher"] = TeacherCache.at(folder).facts.digest
    if (teacher := recipe.train.teacher) is not None:
        identity["teacher"] = fingerprint(resolve_checkpoint(teacher))

    data = {
        phase.manifest_key(split): read.fingerprint(split)
        for phase, read in zip(run.phases, splits, strict=True)
        for split in read.present()
    }
    return identity | {
        "base": base.fingerprint,
        "base_text_files": text_hashes(base.path),
        "data": data,
    }


def packages_of(train: TrainConfig) -> dict:
    """Return the packages that add the task or the method of a run, for its identity."""
    named = [(TASKS.plugin(task), "task") for task in train.tasks]
    named.append((METHODS.plugin(train.method), "method"))
    packages = {f"{flag} {each.name}": each.label for each, flag in named if each}
    if not packages:
        return {}
    return {PACKAGES: packages}


def check_resume(run: Path, base: Path, identity: dict, earlier: dict) -> None:
    """Check that a resumed run is the same run: base, data and everything that shapes a step.

    ``base`` is the folder of the base, ``earlier`` the identity of the run as it began.
    """
    named = "teacher" if identity["recipe"].get("teacher") else "teacher_cache"
    for key, same, other, flag in (
        ("base", earlier["base"] == identity["base"], "another base", "model"),
        ("data", earlier["data"] == identity["data"], "other examples", "data"),
        (
            "teacher",
            earlier.get("teacher") == identity.get("teacher"),
            "another teacher",
            named,
        ),
    ):
        if not same:
            raise PackError(
                f"--resume: {run} was trained on {other}. Resume with the original {key}.",
                "mismatch",
                flag,
            )

    was = earlier.get("loss")
    now = identity.get("loss")
    if was != now:
        trained_with = f"the loss {was} from Python" if was else "the cross-entropy"
        raise PackError(
            f"--resume: {run} was trained with {trained_with}, not with "
            f"{now or 'the cross-entropy'}. Resume with the same `loss` of train_pack.",
            "mismatch",
            "loss",
        )

    if names := changed_texts(base, earlier["base_text_files"]):
        raise PackError(
            f"--resume: {run} was trained with another {names[0]} of its base. Resume with the "
            "original base.",
            "mismatch",
            "model",
        )

    # an option that is newer than the run was what it is by default
    newest = json.loads(json.dumps(Recipe().to_json()))
    then = _with_head(with_bias_correction(newest | earlier["recipe"]))
    now = _with_head(with_bias_correction(newest | json.loads(json.dumps(identity["recipe"]))))

    may_change = set(fields_where(TrainConfig, resumable=True))
    if not then["dropout"]:  # else other masks would be drawn
        may_change |= set(fields_where(TrainConfig, resumable="without-dropout"))
    if "phases" in then:
        may_change.discard("iters")  # where one phase ends, the next begins

    fixed = sorted((set(now) | set(then)) - may_change)
    check_unchanged("--resume", then, {key: now.get(key) for key in fixed})


def _with_head(recipe: dict) -> dict:
    """Return a recipe with the head that ``auto`` means."""
    task = TASKS.get(str(recipe["task"]))
    if task is None:
        return recipe
    return recipe | {"head": task.head_for(str(recipe["head"]))}


def public_recipe(recipe: Recipe, base: Base) -> dict:
    """Return a recipe as a manifest has it: folders without their paths."""
    public = {**recipe.to_json(), "model": base.public_name, "data": public_name(recipe.data.data)}
    for name in ("teacher_cache", "teacher"):
        if public[name]:
            public[name] = public_name(public[name])
    for phase in public.get("phases", ()):
        if "data" in phase:
            data = phase["data"]
            if isinstance(data, str):
                phase["data"] = public_name(data)
            else:
                phase["data"] = [public_name(source) for source in data]
    return public


def with_template_date(settings: RunSettings, base: Base, display: Display) -> RunSettings:
    """Return settings with the date that the chat template reads, if it reads the clock.

    A resumed run has recorded one.
    """
    specified = settings.columns.template_date
    if not reads_clock(base.tokenizer):
        if specified is None:
            return settings
        raise PackError(
            f"--template-date: the chat template of {base.name} does not read the clock. Leave it "
            "out.",
            "conflict",
            "template_date",
        )

    if specified is None:
        specified = date.today().isoformat()

    display.line(
        "template",
        f"reads the clock: {specified} in training (--template-date), the current date in use",
    )
    return settings.with_settings({}, {"template_date": specified})
