"""Facts of a run or a pack for a page, and its settings, whatever their source.

Values come from manifests and run folders that somebody else may have written, so `number` and
`text` take what is usable and leave out the rest: a page is shown as far as it goes.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import PurePosixPath

from ..config.choices import NUMBERS, TASKS, Number, is_lower_better, task_defaults
from ..config.data import DataConfig
from ..config.fields import SECTIONS, default_of, facts_of, flags_of
from ..config.lora import LoRAConfig
from ..config.schema import TrainConfig
from ..config.tasks import tasks_of
from ..terminal import printable_text, with_error

PAGE = "report.html"  # in a run folder
Points = list[tuple[float, float]]  # (batch, value)

Setting = tuple[str, str, bool]  # name, value, whether it differs from the default
# Settings whose values may be paths.
_PATHS = ("model", "data", "hf_dataset", "resume_adapter_file", "teacher_cache", "teacher")

_UNITS = ("tokens", "pairs", "queries")  # that a run may count
_RATES = tuple(f"{unit}_per_s" for unit in _UNITS)
# Series of a curve by the key of a line of metrics.jsonl.
SERIES = ("loss", "valid_loss", "reward", "valid_reward", "learning_rate", "grad_norm")
MOST_POINTS = 500  # of a series on a page
MOST_SAMPLES = 12
MOST_TEXT = 3000  # characters of a sample on a page
_MANY = 1e9  # of a perplexity, whose digits say nothing then


@dataclass(frozen=True)
class MetricChange:
    """A number on held-out examples before and after, each with its standard error or None."""

    number: Number
    before: float
    after: float
    before_error: float | None = None
    after_error: float | None = None

    @property
    def title(self) -> str:
        return self.number.title or self.number.label.capitalize()

    @property
    def texts(self) -> tuple[str, str]:
        """Both values, with their errors."""
        digits = self.number.digits
        before = format_number(self.before, self.before_error, digits)
        return before, format_number(self.after, self.after_error, digits)


@dataclass(frozen=True)
class SampleTexts:
    """A held-out prompt, the wanted answer, and the completions before and after."""

    prompt: str
    wanted: str
    before: str
    after: str


@dataclass(frozen=True)
class Page:
    """The content of a page; every part but the title may be empty.

    Attributes:
        title: the name of the pack or run, without its folder.
        status: what is missing of a run that is not over.
        curve: points of each of `SERIES`, and of the throughput as ``rate``.
        unit: what a run counts: tokens, pairs, queries.
        loss_name: the name of the loss, with its unit (`loss_name`).
        best: the batch whose weights the pack has, where they are not the last ones.
        answered: the batch after which the samples were answered, of a run that is not over.
        memory_gb: gigabytes (10^9) by name: planned, measured.
        recipe: sections of settings: name, value, and whether it differs from the default.
        rows: name and value of what else there is: data, phases, versions, fingerprints.
    """

    title: str
    status: str = ""
    base: str = ""
    figures: Sequence[tuple[str, str]] = ()
    changes: Sequence[MetricChange] = ()
    held_out: str = ""
    curve: Mapping[str, Points] = field(default_factory=dict)
    unit: str = "tokens"
    loss_name: str = "loss"
    best: float | None = None
    samples: Sequence[SampleTexts] = ()
    answered: int | None = None
    memory_gb: Sequence[tuple[str, float]] = ()
    recipe: Sequence[tuple[str, Sequence[tuple[str, str, bool]]]] = ()
    rows: Sequence[tuple[str, str]] = ()
    command: str = ""


def number(value: object, most: float = 1e30) -> float | None:
    """Return a finite number of a size below ``most``, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None

    try:
        value = float(value)
    except OverflowError:
        return None
    if abs(value) < most:
        return value
    return None


def text(value: object, most: int = 200) -> str:
    """Return a text of at most so many characters, without what could steer a terminal."""
    if not isinstance(value, str):
        return ""
    shown = printable_text(value)
    if len(shown) <= most:
        return shown
    return shown[: most - 1] + "…"


def format_number(value: float, error: float | None, digits: int) -> str:
    """Return a number with its error; one whose digits say nothing has three of them."""
    return with_error(value, error, ".3g" if abs(value) >= _MANY else f".{digits}f")


def changes_of(result: Mapping) -> dict[str, MetricChange]:
    """Return every number that has a value before and one after, by its name."""
    changes = {}
    for key in result:
        name = key.removesuffix("_before")
        ends = (f"{name}_before", f"{name}_after")
        before, after = (number(result.get(end), math.inf) for end in ends)
        if name == key or before is None or after is None:
            continue

        errors = (number(result.get(f"{end}_se"), math.inf) for end in ends)
        label = text(name, 40).replace("_", " ")
        described = NUMBERS.get(name) or Number(label, lower_is_better=is_lower_better(name))
        changes[name] = MetricChange(described, before, after, *errors)
    return changes


def unit_of(measured: Iterable[str]) -> str:
    """Return what a run counts, from the names of its measurements, such as ``pairs_per_s``."""
    names = set(measured)
    return next((unit for unit in _UNITS if f"{unit}_per_s" in names), "tokens")


def loss_name(task: str | None) -> str:
    """Return the name of a task's loss, with its unit if it is a mean over tokens."""
    if task is None or (task in TASKS and "ppl" in TASKS[task].metrics):
        return "loss (nats per token)"
    return "loss"


def rate_name(unit: str) -> str:
    return "Supervised tokens/s" if unit == "tokens" else f"{unit.capitalize()}/s"


def name_alone(path: object) -> str:
    """Return the last part of a path; a hub id (``owner/name``) and other names as they are."""
    name = text(path)
    is_path = name.startswith(("/", "~", ".", "\\")) or name.count("/") > 1 or name[1:3] == ":\\"
    if not is_path:
        return name
    return PurePosixPath(name.replace("\\", "/")).name or name


def points(pairs: object) -> Points:
    """Return the pairs of a list that are two finite numbers, by batch."""
    if not isinstance(pairs, (list, tuple)):
        return []

    usable = []
    for pair in pairs:
        if isinstance(pair, (list, tuple)) and len(pair) == 2:
            x, y = map(number, pair)
            if x is not None and y is not None:
                usable.append((x, y))

    return sorted(usable)


def curve_of(lines: Iterable[Mapping]) -> dict[str, Points]:
    pairs: dict[str, list] = {}
    for line in lines:
        for key, value in line.items():
            name = "rate" if key in _RATES else key
            if name in (*SERIES, "rate"):
                pairs.setdefault(name, []).append((line.get("batch"), value))
    return {name: series for name, pair in pairs.items() if (series := points(pair))}


def thinned(series: Points, most: int = MOST_POINTS) -> Points:
    """Return at most so many points: means of neighbours, the last one among them unchanged."""
    if len(series) <= most:
        return series

    size = math.ceil((len(series) - 1) / (most - 1))
    groups = [series[i : i + size] for i in range(0, len(series) - 1, size)]
    means = [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]
    return [*means, series[-1]]


def extremes(points: Points, most: int) -> Points:
    """Return at most ``most`` points of a series: the extremes of neighbouring points."""
    if len(points) <= most:
        return points
    size = math.ceil(len(points) / (most // 2))
    groups = (points[start : start + size] for start in range(0, len(points), size))
    value = itemgetter(1)
    ends = ({min(group, key=value), max(group, key=value)} for group in groups)
    return [point for pair in ends for point in sorted(pair)]


def progress_series(curve: Mapping) -> tuple[str, str]:
    """Return the series that show progress in training and validation: rewards or losses."""
    measure = "reward" if "reward" in curve or "valid_reward" in curve else "loss"
    return measure, f"valid_{measure}"


def short_curve(lines: Iterable[Mapping], most: int = 60) -> dict[str, list]:
    """Return losses or rewards of a run as a manifest keeps them: few points of few digits."""
    curve = curve_of(lines)
    return {
        name: [[round(x), float(f"{y:.5g}")] for x, y in thinned(curve[name], most)]
        for name in progress_series(curve)
        if name in curve
    }


def stored_curve(manifest: Mapping) -> dict[str, Points]:
    """Return the losses or rewards that a manifest keeps (`short_curve`)."""
    stored = (manifest.get("measured") or {}).get("curve")
    if not isinstance(stored, Mapping):
        return {}

    names = progress_series(stored)
    return {name: series for name in names if (series := points(stored.get(name)))}


def samples_of(stored: object) -> list[SampleTexts]:
    if not isinstance(stored, list):
        return []

    samples = []
    for entry in stored[:MOST_SAMPLES]:
        if isinstance(entry, Mapping) and isinstance(entry.get("prompt"), str):
            keys = ("prompt", "wanted", "before", "after")
            texts = [text(entry.get(key), MOST_TEXT).strip() for key in keys]
            samples.append(SampleTexts(*texts))
    return samples


def recipe_sections(recipe: Mapping) -> list[tuple[str, Sequence[Setting]]]:
    """Return the settings of a recipe that have a value, by section of the help.

    Folders are named without their paths: a page is shared.
    """
    sections: dict[str, list[Setting]] = {name: [] for name in SECTIONS}
    start = recipe.get("resume_adapter_file")
    start_name = start.get("name") if isinstance(start, Mapping) else None

    for name, value in (("model", recipe.get("model")), ("resume_adapter_file", start_name)):
        if value is not None:
            sections["Model and data"].append((name, setting_text(name, value), True))

    phases = [phase for phase in recipe.get("phases") or () if isinstance(phase, Mapping)]
    named = (recipe.get("task", TrainConfig.task), *(phase.get("task") for phase in phases))
    recipe_tasks = {task for task in named if isinstance(task, str)}
    of_task = task_defaults(named[0])

    for config in (DataConfig, LoRAConfig, TrainConfig):
        for setting in dataclasses.fields(config):
            value = recipe.get(setting.name)
            if isinstance(value, tuple):
                value = list(value)
            tasks = tasks_of(setting.name)
            is_other_task = bool(tasks) and recipe_tasks.isdisjoint(tasks)
            if value is None or value in ([], {}) or is_other_task:
                continue

            flag = next(iter(flags_of(setting)), setting.name).lstrip("-")
            default = of_task.get(setting.name, default_of(setting))
            if isinstance(default, tuple):
                default = list(default)
            differs = setting.name == "data" or value != default
            section = facts_of(setting).section
            sections[section].append((flag, setting_text(setting.name, value), differs))

    return [(name, settings) for name, settings in sections.items() if settings]


def setting_text(name: str, value: object) -> str:
    """Return a value as text, without the folders of paths."""
    if isinstance(value, (list, tuple)):
        separator = " + " if name in _PATHS else ", "
        return separator.join(setting_text(name, item) for item in value[:20])
    if name in _PATHS:
        if isinstance(value, Mapping):
            value = value.get("path") or value.get("name")
        return name_alone(value)

    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        shown = (f"{text(k)}: {setting_text(str(k), v)}" for k, v in list(value.items())[:20])
        return ", ".join(shown)
    return text(str(value))
