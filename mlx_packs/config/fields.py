"""Settings as fields of frozen dataclasses: the facts of a setting are declared at its field.

Help, flags, checks, and every "which settings ..." (`fields_where`) are read from there.
"""

import dataclasses
import inspect
import math
import textwrap
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from ..errors import Code, PackError, any_of, did_you_mean, flag_of, in_python
from ..reading import read_json, read_yaml
from .choices import TASKS, Table, task_defaults
from .functions import FUNCTION, names_function
from .other_names import OTHER_NAMES, OTHER_VALUES, ours_for, removal, value_hint
from .values import typed_value

S = TypeVar("S", bound="Settings")

# Of options in help, in this order.
SECTIONS = (
    "Model and data",
    "Adapter",
    "Optimization",
    "Memory and speed",
    "Evaluation and gates",
    "Sampling",
    "Server",
    "Preferences",
    "Rewards",
    "Embedding",
    "Reranking",
    "Several machines",
    "Output",
)


@dataclass(frozen=True)
class Facts:
    """Facts of a setting besides its name, type and default."""

    help: str  # full sentences, without the default
    section: str  # one of `SECTIONS`
    choices: Collection[str] = ()  # valid values of a text; empty where any text is valid
    function: bool = False  # whether ``FILE.py:NAME``, a function of the user's, is valid, too
    metavar: str | None = None  # what help calls the value; by its type where None
    shown_default: str | None = None  # the default in words, where the value explains nothing
    flags: tuple[str, ...] | None = None  # by the name where None; empty where only files set it
    at_least: float | None = None  # smallest valid number (of every value of a mapping)
    or_all: bool = False  # whether -1 is valid too, and means all
    above: float | None = None  # number that a valid one exceeds
    at_most: float | None = None  # largest valid number
    below: float = math.inf  # number that a valid one stays under; infinity is invalid by default
    method: str | None = None  # the one method that it belongs to
    phase: bool = False  # whether a phase of a run may have its own
    column: bool = False  # whether it names a column of the data
    tasks: tuple[str, ...] = ()  # that have it; empty where all do
    memory: bool = False  # whether the peak memory of a run depends on it
    disk: bool = False  # whether the disk space of a run depends on it
    time: bool = False  # whether its time does, but neither memory nor disk space
    # Whether it may differ when a run is resumed. "without-dropout": a change keeps the results up
    # to rounding, but dropout would draw other masks.
    resumable: bool | Literal["without-dropout"] = False
    dense: tuple = ()  # values that fit a dense base in float32; empty where all do
    own_layers: Literal["adapter", "optimizer", "step"] | None = None  # its use in `LayerTrainer`


def option(default: Any, help: str, *, section: str, **facts: Any) -> Any:
    """Return a field of a configuration with its default, its help and its other `Facts`."""
    metadata = {"facts": Facts(help, section, **facts)}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def facts_of(field: dataclasses.Field) -> Facts:
    return field.metadata["facts"]


def flags_of(field: dataclasses.Field) -> tuple[str, ...]:
    """Return the flags of a setting; none if only files can specify it."""
    flags = facts_of(field).flags
    return (flag_of(field.name),) if flags is None else flags


def default_of(field: dataclasses.Field) -> Any:
    if callable(field.default_factory):
        return field.default_factory()
    return field.default


def default_in_words(field: dataclasses.Field, *tasks: str) -> str:
    """Return the default of a setting for some tasks, by default all; empty for no value."""
    text = facts_of(field).shown_default or _in_words(default_of(field))
    others: dict[str, list[str]] = {}
    for task in tasks or TASKS:
        defaults = task_defaults(task)
        if field.name in defaults:
            others.setdefault(_in_words(defaults[field.name]), []).append(task)

    if len(tasks) == 1:
        return next(iter(others), text)

    of_tasks = [f"{value} with --task {any_of(names)}" for value, names in others.items()]
    return "; ".join(part for part in (text, *of_tasks) if part)


def _in_words(value: Any) -> str:
    if value is None or value in ((), {}):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


_CLASSES: dict[str, Any] = {}  # of settings, by name


class Fault(NamedTuple):
    """A fault of a setting; ``text`` follows the name of the setting."""

    setting: str
    text: str
    code: Code = "invalid"


class _Doc:
    """The docstring of a class of settings: its own, and the meaning and default of each."""

    def __init__(self, text: str | None) -> None:
        self.text = inspect.cleandoc(text or "")

    def __get__(self, settings: "Settings | None", cls: type["Settings"]) -> str:
        parts = dict.fromkeys(SECTIONS, "")
        fields = vars(cls).get("__dataclass_fields__", {}).values()
        for field in (each for each in fields if "facts" in each.metadata):
            default = default_in_words(field, *facts_of(field).tasks)
            text = f"{field.name}: {in_python(facts_of(field).help)}"
            text += f" [{default}]" if default else ""
            indents = {"initial_indent": "    ", "subsequent_indent": "        "}
            parts[facts_of(field).section] += textwrap.fill(text, 96, **indents) + "\n"
        return "\n\n".join([self.text, *(f"{k}:\n{v[:-1]}" for k, v in parts.items() if v)])


class Settings:
    """Base of the configurations: each value gets the type of its field and is checked.

    Subclasses are dataclasses without a ``repr`` of their own. They may have a method
    ``_conflicts``, which yields the faults of settings that exclude or require each other.
    """

    def __init_subclass__(cls) -> None:
        _CLASSES[cls.__name__] = cls
        cls.__doc__ = _Doc(vars(cls).get("__doc__"))

    def __new__(cls, *args: Any, **settings: Any) -> "Settings":
        """Reject a name that is no field, and name the right one, as Python's error does not."""
        names = [field.name for field in dataclasses.fields(cls)]
        for name in settings:
            if name not in names:
                raise unknown_setting(name, names, cls.__name__)

        positional = sum(not field.kw_only for field in dataclasses.fields(cls))
        if len(args) > positional:
            raise PackError(
                f"{cls.__name__}: takes settings by name, such as {cls.__name__}({names[0]}=...), "
                f"but got {args[positional]!r} without one.",
                flag=names[0],
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        kinds = _kinds(type(self))
        specified = set()  # other than the defaults, which are valid
        for name, value in vars(self).items():
            if value is not getattr(type(self), name, dataclasses.MISSING):
                specified.add(name)
                object.__setattr__(self, name, typed_value(value, kinds[name], name))

        faults = list(_field_faults(self, specified))
        for cls in reversed(type(self).__mro__):
            if "_conflicts" in vars(cls):
                faults += cls._conflicts(self)
        if faults:
            spelled = {f.name: next(iter(flags_of(f)), f.name) for f in dataclasses.fields(self)}
            text = " ".join(f"{spelled[fault.setting]}: {fault.text}" for fault in faults)
            raise PackError(text, faults[0].code, faults[0].setting)

    def __repr__(self) -> str:
        values = (f"{name}={getattr(self, name)!r}" for name in self.changed(vars(self)))
        return f"{type(self).__name__}({', '.join(values)})"

    @classmethod
    def from_mapping(cls: type[S], values: Mapping[str, Any], where: str = "") -> S:
        """Return the configuration that a mapping has.

        Args:
            values: By the names of the settings; texts stand for the numbers that they spell.
            where: The file that they are from, for errors; empty for flags and Python.

        Raises:
            PackError: If a key is unknown, or a value is wrong.
        """
        kinds = _kinds(cls)
        names = [field.name for field in dataclasses.fields(cls)]
        typed = {}
        for key, value in values.items():
            if key not in names:
                raise unknown_setting(key, names, where)
            typed[key] = typed_value(value, kinds[key], key, where)

        try:
            return cls(**typed)
        except PackError as error:
            if not where:
                raise
            raise PackError(str(error), error.code, error.flag, where=where) from None

    def defaults(self) -> dict[str, Any]:
        """Return the default of each setting."""
        return {field.name: default_of(field) for field in dataclasses.fields(self)}

    def changed(self, names: Iterable[str]) -> list[str]:
        """Return the settings among ``names`` that differ from their defaults, in that order."""
        defaults = self.defaults()
        return [
            name for name in names if name in defaults and getattr(self, name) != defaults[name]
        ]


@cache
def _kinds(cls: type[Settings]) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _field_faults(settings: Settings, names: Collection[str]) -> Iterator[Fault]:
    for field in dataclasses.fields(settings):
        if field.name not in names:
            continue

        value = getattr(settings, field.name)
        facts = facts_of(field)
        is_known = value in facts.choices or (facts.function and names_function(value))
        if facts.choices and isinstance(value, str) and not is_known:
            valid = facts.choices
            if isinstance(valid, Table):
                valid = (*valid, *valid.added())
            if facts.function:
                valid = (*valid, FUNCTION)
            text = f"must be one of {', '.join(valid)}, but is '{value}'."
            text += value_hint(field.name, value)
            yield Fault(field.name, text, "unknown")

        values = [value]
        every = ""
        if isinstance(value, Mapping):
            values = value.values()
            every = "every value "
        if not all(_in_range(v, facts) for v in values):
            yield Fault(field.name, f"{every}must be {valid_range(facts)}, but is {value}.")


def _in_range(value: Any, facts: Facts) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return True
    if facts.or_all and value == -1:
        return True
    if facts.at_least is not None and not value >= facts.at_least:
        return False
    if facts.above is not None and not value > facts.above:
        return False
    return value < facts.below if facts.at_most is None else value <= facts.at_most


def valid_range(facts: Facts) -> str:
    """Return a range of numbers in words: ``in [0, 1)``, ``above 0``, ``at least 1``."""
    if facts.at_most in (None, math.inf) and facts.below == math.inf:
        low = f"above {facts.above:g}" if facts.above is not None else f"at least {facts.at_least}"
        return f"{low}, or -1 for all" if facts.or_all else low

    low = f"({facts.above}" if facts.above is not None else f"[{facts.at_least}"
    high = f"{facts.below})" if facts.at_most is None else f"{facts.at_most}]"
    return f"in {low}, {high}"


def fields_where(*configs: type[Settings], **facts: Any) -> tuple[str, ...]:
    """Return the names of the settings of which all ``facts`` are true, in their order.

    ``fields_where(TrainConfig, memory=True)`` has those on which the peak memory depends.
    """
    return tuple(
        field.name
        for config in configs
        for field in dataclasses.fields(config)
        if all(getattr(facts_of(field), name) == value for name, value in facts.items())
    )


def unknown_setting(key: Any, valid: Iterable[str], where: str, parent: str = "") -> PackError:
    """Return the error for a key that is no setting; ``parent`` is the mapping that it is in."""
    valid = list(valid)
    name = str(key).replace("-", "_")
    if text := removal(name):
        return PackError(f"{parent}{key}: {text}", "unknown", name, where=where)

    ours = ours_for(name, valid)
    value = OTHER_VALUES.get(name)
    example = f": {ours}={value!r}" if value else ""
    fault = "is not a setting."

    if ours in valid:
        hint = f"It is called '{ours}' here{example}."
    elif not parent and (owner := _owner_of(ours or name)):
        hint = f"It is called '{ours}' here, {owner}{example}."
        if not ours:
            fault = f"is {owner}."
            hint = "Give it there."
    else:
        hint = did_you_mean(str(key), valid)

    return PackError(f"{parent}{key}: {fault} {hint}", "unknown", key, where=where)


def _owner_of(name: str) -> str:
    """Return where a setting belongs; empty if nowhere."""
    for cls in ("LoRAConfig", "TrainConfig", "DataConfig"):  # of `train_pack`
        if name in getattr(_CLASSES.get(cls), "__dataclass_fields__", ()):
            return f"a setting of {cls}"
    if name in OTHER_NAMES.values():
        return "an argument of train_pack"
    return ""


def read_settings(path: str | Path) -> dict:
    """Return the mapping in a YAML or JSON file.

    Raises:
        PackError: the file cannot be read, or contains something else.
    """
    path = Path(path)
    try:
        values = read_json(path, object) if path.suffix == ".json" else read_yaml(path)
    except OSError as error:
        code: Code = "not-found" if isinstance(error, FileNotFoundError) else "unreadable"
        raise PackError(f"{path}: cannot be read ({error.strerror}).", code, "config") from None
    except PackError as error:
        raise PackError(error.message, error.code, "config") from error

    if not isinstance(values, dict | None):
        message = f"{path}: must be a mapping of settings, but is a {type(values).__name__}."
        raise PackError(message, "unreadable", "config")
    return values or {}
