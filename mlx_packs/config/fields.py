"""Settings as fields of frozen dataclasses: what is true of a setting stands at its field.

Help, flags, checks, and every "which settings ..." (`fields_where`) are read from there, so that no
list of field names is kept by hand.
"""

import dataclasses
import math
import re
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
    "Output",
    "Embedding",
)  # of options in help, in this order


@dataclass(frozen=True)
class Facts:
    """What is true of a setting beside its name, type and default.

    Attributes:
        help: full sentences, without the default.
        section: its section of the help, one of `SECTIONS`.
        choices: valid values of a text; empty where any text is valid.
        metavar: what help calls its value; by its type where None.
        shown_default: the default as help shows it, where the value does not explain itself.
        flags: how the command line spells it; by its name where None, not at all where empty.
        at_least: smallest valid number (of every value of a mapping).
        above: number that a valid one exceeds.
        at_most: largest valid number.
        below: number that a valid one stays under; infinity is invalid by default.
        task: the one task that it belongs to.
        method: the one method that it belongs to.
        losses: the embedding losses that it belongs to.
        phase: whether a phase of a run may have its own.
        column: whether it names a column of the data.
        memory: whether the peak memory of a run depends on it.
        resumable: whether it may differ when a run is resumed; where "without-dropout", a change
            keeps the results up to rounding, but dropout would draw other masks.
        dense: the values that fit a base whose weights are dense in float32; empty where all do.
        own_layers: what `LayerTrainer` uses it for; None where it has no meaning there.
    """

    help: str
    section: str
    choices: tuple[str, ...] = ()
    metavar: str | None = None
    shown_default: str | None = None
    flags: tuple[str, ...] | None = None
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float = math.inf
    task: str | None = None
    method: str | None = None
    losses: tuple[str, ...] = ()
    phase: bool = False
    column: bool = False
    memory: bool = False
    resumable: bool | Literal["without-dropout"] = False
    dense: tuple = ()
    own_layers: Literal["adapter", "optimizer", "step"] | None = None


def option(default: Any, help: str, *, section: str, **facts: Any) -> Any:
    """Field of a configuration with its default, its help and what else is true of it (`Facts`)."""
    metadata = {"facts": Facts(help, section, **facts)}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def facts_of(field: dataclasses.Field) -> Facts:
    """Return what is true of a setting."""
    return field.metadata["facts"]


def default_of(field: dataclasses.Field) -> Any:
    """Return the default of a setting."""
    factory = field.default_factory
    return field.default if factory is dataclasses.MISSING else factory()


def spelling_of(field: dataclasses.Field) -> str:
    """Return how errors call a setting: its flag, or its key where it has none."""
    return flag_of(field.name) if facts_of(field).flags != () else field.name


class Fault(NamedTuple):
    """What is wrong with a setting: ``text`` follows the name of the setting."""

    setting: str
    text: str
    code: Code = "invalid"


class Settings:
    """Base of the configurations: each is checked when it is made."""

    def __post_init__(self) -> None:
        faults = [*_field_faults(self), *self._conflicts()]
        if faults:
            spelled = {f.name: spelling_of(f) for f in dataclasses.fields(self)}
            text = " ".join(f"{spelled[fault.setting]}: {fault.text}" for fault in faults)
            raise PackError(text, faults[0].code, faults[0].setting)

    def _conflicts(self) -> Iterator[Fault]:
        """Faults of settings that exclude or require each other."""
        yield from ()

    def changed(self, names: Iterable[str]) -> list[str]:
        """Return the settings among ``names`` that differ from their defaults, in that order."""
        defaults = {f.name: default_of(f) for f in dataclasses.fields(self)}
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
            yield Fault(field.name, f"{every}must be {_range(facts)}, but is {value}.")


def _in_range(value: Any, facts: Facts) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return True
    if facts.above is not None:
        enough = value > facts.above
    else:
        enough = facts.at_least is None or value >= facts.at_least
    return enough and (value <= facts.at_most if facts.at_most is not None else value < facts.below)


def _range(facts: Facts) -> str:
    """Return a range of numbers in words: ``in [0, 1)``, ``above 0``, ``at least 1``."""
    if facts.at_most in (None, math.inf) and facts.below == math.inf:
        return f"above {facts.above:g}" if facts.above is not None else f"at least {facts.at_least}"
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


def flags_as_keys(text: str) -> str:
    """Return a message in terms of a file: ``--max-seq-length`` is ``max_seq_length``."""
    return re.sub(
        r"(?<![\w-])--(?:no-)?([a-z][a-z0-9-]*)", lambda match: match[1].replace("-", "_"), text
    )


def is_regex(pattern: str) -> bool:
    """Return whether a text is a regular expression."""
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True
