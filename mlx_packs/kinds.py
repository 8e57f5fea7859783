"""Kinds of values in a file that somebody else wrote, checked before the values are used.

A table maps keys to kinds: ``{"base.num_layers": "an integer above 0", "files.*": "a mapping"}``.
A key comes before the keys inside it; ``*`` is each entry of a mapping or a list. Where a kind
ends in ``?`` there may be nothing, or null; ``… or a list of such`` takes several, too.
"""

import math
import re
from collections.abc import Iterator, Mapping

MISSING = object()


def _is_int(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**53


def _is_number(value: object) -> bool:
    return _is_int(value, -(2**53)) or (isinstance(value, float) and math.isfinite(value))


def _is_list_of(value: object, kind: str) -> bool:
    return isinstance(value, list) and all(_is(item, kind) for item in value)


def _is(value: object, kind: str) -> bool:
    if kind.endswith(_SEVERAL):
        kind = kind.removesuffix(_SEVERAL)
        return _is(value, kind) or _is_list_of(value, kind)
    if bounds := _RANGE.fullmatch(kind):
        return _is_int(value, int(bounds[1])) and value <= int(bounds[2])
    return KINDS[kind](value)


_RANGE = re.compile(r"an integer from (\d+) to (\d+)")
_SEVERAL = " or a list of such"
KINDS = {
    "text": lambda v: isinstance(v, str),
    "true or false": lambda v: isinstance(v, bool),
    "an integer of 0 or more": lambda v: _is_int(v, 0),
    "an integer above 0": lambda v: _is_int(v, 1),
    "an integer above 1": lambda v: _is_int(v, 2),
    "an integer": lambda v: _is_int(v, -(2**53)),
    "a number": _is_number,
    "a finite number above 0": lambda v: _is_number(v) and v > 0,
    "a mapping with something in it": lambda v: isinstance(v, dict) and bool(v),
    "a mapping": lambda v: isinstance(v, dict),
    "a list": lambda v: isinstance(v, list),
    "a list of texts": lambda v: _is_list_of(v, "text"),
    "text or a list of texts": lambda v: _is(v, f"text{_SEVERAL}"),
    "a list of integers": lambda v: _is_list_of(v, "an integer of 0 or more"),
    "a list with something in it": lambda v: isinstance(v, list) and bool(v),
    "a mapping or null": lambda v: v is None or isinstance(v, dict),
}


def check_kind(key: str, value: object, kind: str) -> None:
    """Raise a ValueError that names the key, unless a value is of a kind."""
    if kind.endswith("?") and (value is MISSING or value is None):
        return
    if not _is(value, kind.removesuffix("?")):
        problem = "is missing" if value is MISSING else f"is {repr(value)[:60]}"
        raise ValueError(f"{key} must be {kind.removesuffix('?')}, but {problem}")


def _values(value: object, parts: list[str], where: str) -> Iterator[tuple[str, object]]:
    """Yield each place that a key matches, with its value; nothing if its mapping is missing."""
    if not parts:
        yield where, value
        return

    part, *rest = parts
    entries: dict[str, object] = {}
    if isinstance(value, list) and part == "*":
        entries = {f"[{i}]": entry for i, entry in enumerate(value)}
    elif isinstance(value, dict):
        names = value if part == "*" else [part]
        entries = {f".{name}": value.get(name, MISSING) for name in names}

    for name, entry in entries.items():
        yield from _values(entry, rest, where + name)


def check_keys(mapping: dict, keys: Mapping[str, str], where: str = "") -> None:
    """Raise a ValueError for the first value that is not of its kind; ``where`` is its mapping."""
    for key, kind in keys.items():
        for place, value in _values(mapping, key.split("."), where):
            check_kind(place.removeprefix("."), value, kind)
