"""Parameters of a sweep: the values that a key of the recipe takes."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

from ..config.parse import setting_error, typed_value, unknown_setting

SCALES = ("linear", "log")
_RANGE = ("min", "max", "scale")
_EXPONENT = re.compile(r"-?[0-9]+(\.[0-9]+)?[eE][+-]?[0-9]+")  # which YAML 1.1 reads as text


class Parameter(Protocol):
    """The values of one key.

    Attributes:
        values: all of them; None of a range, which is not enumerated.
        is_log: whether its values are compared by their ratios.
    """

    @property
    def values(self) -> Sequence[Any] | None: ...  # noqa: D102

    @property
    def is_log(self) -> bool: ...  # noqa: D102

    def draw(self, random: Random) -> Any:
        """Return a value at random."""


@dataclass(frozen=True)
class Choice:
    """Values that are listed; each is drawn as often as any other."""

    values: tuple[Any, ...]
    is_log: bool = False

    def draw(self, random: Random) -> Any:
        """Return one of the values."""
        return random.choice(self.values)


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``, both included; drawn uniformly, or uniformly in their log.

    They are integers if both ends are.
    """

    low: float
    high: float
    is_log: bool = False
    values: None = None

    def draw(self, random: Random) -> float:
        """Return a number; floats have four digits, so that a table shows them in full."""
        if isinstance(self.low, int) and isinstance(self.high, int):
            # each integer has the interval around it
            drawn = self._between(self.low - 0.5, self.high + 0.5, random)
            return min(max(round(drawn), self.low), self.high)
        drawn = float(f"{self._between(self.low, self.high, random):.4g}")
        return min(max(drawn, self.low), self.high)

    def _between(self, low: float, high: float, random: Random) -> float:
        if self.is_log:
            return math.exp(random.uniform(math.log(low), math.log(high)))
        return random.uniform(low, high)


def parse_parameters(parameters: Mapping, where: str) -> dict[str, Parameter]:
    """Return the parameters of a sweep by the key of the recipe that each is about.

    Args:
        parameters: a list of values, or a mapping with ``min``, ``max`` and perhaps ``scale``, by
            key; a key in a mapping is ``rank_pattern.v_proj``.
        where: the file.

    Raises:
        PackError: there is none, or one has no values, values twice, or a range without numbers.
    """
    if not parameters:
        text = "names no key of the recipe. Give at least one, such as `rank: [8, 16]`."
        raise setting_error(text, "sweep.parameters", where)
    return {
        str(key): _parameter(values, f"sweep.parameters.{key}", where)
        for key, values in parameters.items()
    }


def _parameter(values: Any, key: str, where: str) -> Parameter:
    if isinstance(values, Mapping):
        return _range(values, key, where)
    if not isinstance(values, list):
        text = f"must be a list of values, or {{min: …, max: …}}, but is {values!r}."
        raise setting_error(text, key, where)
    if not values:
        raise setting_error("has no values. List at least one.", key, where)
    if twice := next((v for i, v in enumerate(values) if v in values[:i]), None):
        raise setting_error(f"lists {twice!r} twice. List it once.", key, where)
    return Choice(
        tuple(float(v) if isinstance(v, str) and _EXPONENT.fullmatch(v) else v for v in values)
    )


def _range(values: Mapping, key: str, where: str) -> Range:
    for name in values:
        if name not in _RANGE:
            raise unknown_setting(name, _RANGE, where, f"{key}.")
    if missing := next((name for name in ("min", "max") if name not in values), None):
        raise setting_error(f"has no {missing}. Give min and max.", key, where)
    low, high = (_number(values[name], f"{key}.{name}", where) for name in ("min", "max"))
    scale = typed_value(values.get("scale", SCALES[0]), str, f"{key}.scale", where)
    if scale not in SCALES:
        text = f"must be one of {', '.join(SCALES)}, but is '{scale}'."
        raise setting_error(text, f"{key}.scale", where, "unknown")
    if not low < high:
        raise setting_error(f"min {low:g} must be less than max {high:g}.", key, where)
    if scale == "log" and low <= 0:
        text = f"must be above 0 with scale log, but is {low:g}. Raise it, or use scale linear."
        raise setting_error(text, f"{key}.min", where)
    return Range(low, high, scale == "log")


def _number(value: Any, key: str, where: str) -> float:
    """Return a finite number: an integer if it is written as one."""
    number = typed_value(value, float, key, where)
    if not math.isfinite(number):
        raise setting_error(f"must be a finite number, but is {value}.", key, where)
    return value if type(value) is int else number


def with_values(recipe: Mapping, values: Mapping[str, Any]) -> dict:
    """Return the settings of a recipe with other values; ``a.b`` is the key b of the mapping a."""
    changed = dict(recipe)
    for key, value in values.items():
        first, _, rest = key.partition(".")
        if rest:
            inner = changed.get(first)
            value = with_values(inner if isinstance(inner, Mapping) else {}, {rest: value})
        changed[first] = value
    return changed
