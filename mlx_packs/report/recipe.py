"""A run's settings for readers: by section, each as its flag, those that were changed first."""

import dataclasses
from collections.abc import Mapping, Sequence

from ..config.choices import task_defaults
from ..config.data import DataConfig
from ..config.fields import SECTIONS, default_of, facts_of, flags_of
from ..config.lora import LoRAConfig
from ..config.schema import TrainConfig
from ..config.tasks import tasks_of
from .facts import name_alone, text

Setting = tuple[str, str, bool]  # name, value, whether it differs from the default
# Settings whose values may be paths.
_PATHS = ("model", "data", "hf_dataset", "resume_adapter_file", "teacher_cache", "teacher")


def recipe_sections(recipe: Mapping) -> list[tuple[str, Sequence[Setting]]]:
    """Return the settings of a recipe that have a value, by section of the help.

    Folders are named without their paths: a page is shared.
    """
    sections: dict[str, list[Setting]] = {name: [] for name in SECTIONS}
    start = recipe.get("resume_adapter_file")
    start_name = start.get("name") if isinstance(start, Mapping) else None

    for name, value in (("model", recipe.get("model")), ("resume_adapter_file", start_name)):
        if value is not None:
            sections["Model and data"].append((name, _shown(name, value), True))

    phases = [phase for phase in recipe.get("phases") or () if isinstance(phase, Mapping)]
    named = (recipe.get("task", TrainConfig.task), *(phase.get("task") for phase in phases))
    recipe_tasks = {task for task in named if isinstance(task, str)}
    of_task = task_defaults(named[0])

    for config in (DataConfig, LoRAConfig, TrainConfig):
        for field in dataclasses.fields(config):
            value = recipe.get(field.name)
            if isinstance(value, tuple):
                value = list(value)
            tasks = tasks_of(field.name)
            is_other_task = bool(tasks) and recipe_tasks.isdisjoint(tasks)
            if value is None or value in ([], {}) or is_other_task:
                continue

            flag = next(iter(flags_of(field)), field.name).lstrip("-")
            default = of_task.get(field.name, default_of(field))
            if isinstance(default, tuple):
                default = list(default)
            differs = field.name == "data" or value != default
            section = facts_of(field).section
            sections[section].append((flag, _shown(field.name, value), differs))

    return [(name, settings) for name, settings in sections.items() if settings]


def _shown(name: str, value: object) -> str:
    """Return a value as text, without the folders of paths."""
    if isinstance(value, (list, tuple)):
        separator = " + " if name in _PATHS else ", "
        return separator.join(_shown(name, item) for item in value[:20])
    if name in _PATHS:
        if isinstance(value, Mapping):
            value = value.get("path") or value.get("name")
        return name_alone(value)

    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        shown = (f"{text(k)}: {_shown(str(k), v)}" for k, v in list(value.items())[:20])
        return ", ".join(shown)
    return text(str(value))
