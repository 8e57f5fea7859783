"""Settings as fields of frozen dataclasses: the facts of a setting are declared at its field.

Help, flags, checks, and every "which settings ..." (`fields_where`) are read from there.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ..errors import Code, PackError, flag_of

SECTIONS = (
    "Model and data",
    "Adapter",
    "Optimization",
    "Memory and speed",
    "Evaluation and gates",
    "Sampling",
    "Server",
    "Output",
    "Preferences",
    "Rewards",
    "Embedding",
    "Several machines",
)  # of options in help, in this order


@dataclass(frozen=True)
class Facts:
    """Facts of a setting besides its name, type and default."""

    help: str  # full sentences, without the default
    section: str  # one of `SECTIONS`
    choices: tuple[str, ...] = ()  # valid values of a text; empty where any text is valid
    metavar: str | None = None  # what help calls the value; by its type where None
    shown_default: str | None = None  # the default in words, where the value explains nothing
    flags: tuple[str, ...] | None = None  # by the name where None; empty where only files set it
    at_least: float | None = None  # smallest valid number (of every value of a mapping)
    or_all: bool = False  # whether -1 is valid too, and means all
    above: float | None = None  # number that a valid one exceeds
    at_most: float | None = None  # largest valid number
    below: float = math.inf  # number that a valid one stays under; infinity is invalid by default
    tasks: tuple[str, ...] = ()  # that it belongs to; empty where all have it
    method: str | None = None  # the one method that it belongs to
    phase: bool = False  # whether a phase of a run may have its own
    column: bool = False  # whether it names a column of the data
    memory: bool = False  # whether the peak memory of a run depends on it
    disk: bool = False  # whether the disk space of a run depends on it
    # Whether it may differ when a run is resumed. "without-dropout": a change keeps the results up
    # to rounding, but dropout would draw other masks.
    resumable: bool | Literal["without-dropout"] = False
    dense: tuple = ()  # values that fit a dense base in float32; empty where all do
    own_layers: Literal["adapter", "optimizer", "step"] | None = None  # its use in `LayerTrainer`


def option(default: Any, help: str, *, section: str, **facts: Any) -> Any:
    """Field of a configuration with its default, its help and what else is true of it (`Facts`)."""
    metadata = {"facts": Facts(help, section, **facts)}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def facts_of(field: dataclasses.Field) -> Facts:
    """Return the facts of a setting."""
    return field.metadata["facts"]


def flags_of(field: dataclasses.Field) -> tuple[str, ...]:
    """Return the flags of a setting; none if only files can specify it."""
    flags = facts_of(field).flags
    return (flag_of(field.name),) if flags is None else flags


class Fault(NamedTuple):
    """A fault of a setting; ``text`` follows the name of the setting."""

    setting: str
    text: str
    code: Code = "invalid"


class Settings:
    """Base of the configurations: each is checked when it is made."""

    def __post_init__(self) -> None:
        faults = [*_field_faults(self), *self._conflicts()]
        if faults:
            spelled = {f.name: next(iter(flags_of(f)), f.name) for f in dataclasses.fields(self)}
            text = " ".join(f"{spelled[fault.setting]}: {fault.text}" for fault in faults)
            raise PackError(text, faults[0].code, faults[0].setting)

    def _conflicts(self) -> Iterator[Fault]:
        """Faults of settings that exclude or require each other."""
        yield from ()

    def changed(self, names: Iterable[str]) -> list[str]:
        """Return the settings among ``names`` that differ from their defaults, in that order."""
        defaults = {
            f.name: f.default_factory() if f.default is dataclasses.MISSING else f.default
            for f in dataclasses.fields(self)
        }
        return [
            name for name in names if name in defaults and getattr(self, name) != defaults[name]
        ]


def _field_faults(settings: Settings) -> Iterator[Fault]:
    for field in dataclasses.fields(settings):
        value, facts = getattr(settings, field.name), facts_of(field)
        if facts.choices and isinstance(value, str) and value not in facts.choices:
            valid = ", ".join(facts.choices)
            yield Fault(field.name, f"must be one of {valid}, but is '{value}'.", "unknown")
        values = value.values() if isinstance(value, Mapping) else [value]
        if not all(_in_range(v, facts) for v in values):
            every = "every value " if isinstance(value, Mapping) else ""
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
    """Return the names of the settings of which all ``facts`` are true, as they are declared.

    Args:
        configs: the configurations to search.
        facts: values of `Facts`: ``fields_where(TrainConfig, memory=True)``.
    """
    return tuple(
        field.name
        for config in configs
        for field in dataclasses.fields(config)
        if all(getattr(facts_of(field), name) == value for name, value in facts.items())
    )
