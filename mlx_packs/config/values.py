"""Values of settings: each converted to the type of its field, and sizes as people write them."""

import dataclasses
import math
import os
import re
import types
import typing
from collections.abc import Mapping
from typing import Any

from ..errors import Code, PackError, flag_of
from ..reading import parse_json

_UNITS = {
    **{"": 1, "B": 1, "K": 10**3, "KB": 10**3, "M": 10**6, "MB": 10**6, "G": 10**9, "GB": 10**9},
    **{"T": 10**12, "TB": 10**12, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30},
}


def bytes_of(text: str, unit: str = "") -> int | None:
    """Return the bytes of a size (``8GB``, ``8 gb``, ``24GiB``), or None if it is none.

    ``unit`` counts for a number without one.
    """
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([a-z]*)", text.strip(), re.IGNORECASE)
    if match is None:
        return None
    factor = _UNITS.get((match[2] or unit).upper())
    if factor is None:
        return None
    number = float(match[1]) * factor
    if not math.isfinite(number):
        return None
    return int(number)


_NUMBERS = {int: "an integer", float: "a number"}
_KINDS = {bool: "true or false", str: "text", dict: "a mapping", list: "a list", **_NUMBERS}


def typed_value(value: Any, kind: Any, key: str, where: str = "") -> Any:
    """Return ``value`` as ``kind``; integers pass for floats, and texts for the numbers they spell.

    ``kind`` is the type of a field: a class, a union, ``tuple[X, ...]`` or ``dict[str, X]``.
    ``key`` is the setting, or where in it the value is (``rank_pattern.q_proj``); ``where`` is the
    file, empty for flags and Python.

    Raises:
        PackError: the value is of another type.
    """
    origin = typing.get_origin(kind)
    parts = typing.get_args(kind)

    if getattr(value, "ndim", None) == 0:  # a number of NumPy or MLX
        value = value.item()
    elif isinstance(value, os.PathLike):
        value = os.fspath(value)

    if origin in (typing.Union, types.UnionType):
        return _one_of(parts, value, key, where)
    if origin is tuple:
        return _items(value, parts[0], key, where)
    if origin is dict:
        if isinstance(value, str):
            value = _pairs(value, key, where)
        if not isinstance(value, Mapping):
            raise _mistyped("a mapping", value, key, where)
        return {str(k): typed_value(v, parts[1], f"{key}.{k}", where) for k, v in value.items()}

    if kind in _NUMBERS and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            number = float(value)
            if kind is float or number == int(number):
                return kind(number)
        except (ValueError, OverflowError):
            pass
    elif kind is dict and isinstance(value, str):
        return _mapping_of_json(value, key, where)
    elif kind not in _NUMBERS and isinstance(value, kind):
        return value
    elif dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        settings = {str(k): v for k, v in value.items()}
        place = f"{where}: {key}" if where else key
        return kind.from_mapping(settings, place)

    raise _mistyped(_KINDS.get(kind, "a mapping"), value, key, where)


def _one_of(kinds: tuple, value: Any, key: str, where: str) -> Any:
    """Return ``value`` as one of several kinds; `Any` accepts every value."""
    if Any in kinds or (value is None and types.NoneType in kinds):
        return value
    kinds = tuple(kind for kind in kinds if kind is not types.NoneType)
    if len(kinds) == 1:
        return typed_value(value, kinds[0], key, where)
    if isinstance(value, kinds):
        return value
    raise _mistyped(" or ".join(_KINDS[kind] for kind in kinds), value, key, where)


def _mapping_of_json(text: str, key: str, where: str) -> dict:
    try:
        value = parse_json(text)
    except ValueError:
        value = text
    if not isinstance(value, dict):
        raise _mistyped("a mapping in JSON", text, key, where)
    return value


def _items(value: Any, kind: Any, key: str, where: str) -> tuple:
    items = value.split(",") if isinstance(value, str) else value
    if isinstance(items, (set, frozenset)):
        items = sorted(items, key=str)
    if not isinstance(items, (list, tuple)):
        raise _mistyped("a list", value, key, where)
    items = [item.strip() if isinstance(item, str) else item for item in items]
    return tuple(
        typed_value(item, kind, f"{key}[{i}]", where) for i, item in enumerate(items) if item != ""
    )


def _pairs(text: str, key: str, where: str) -> dict[str, str]:
    # a=8,b=2 as a flag has it; in YAML it is a mapping
    pairs = [part.rpartition("=") for part in text.split(",") if part.strip()]
    if not all(name.strip() and value.strip() for name, _, value in pairs):
        raise _mistyped("of the form name=number,name=number", text, key, where)

    names = [name.strip() for name, _, _ in pairs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise setting_error(f"has two values for '{twice}'. Give one.", key, where, "conflict")
    return {name.strip(): value.strip() for name, _, value in pairs}


def setting_error(text: str, key: str, where: str = "", code: Code = "invalid") -> PackError:
    """Return the error of a setting, which begins with its file and key, or with its flag.

    ``key`` may be a place in the setting (``rank_pattern.q_proj``); ``where`` is the file, empty
    for flags and Python.
    """
    place = flag_of(key) if key.isidentifier() and not where else key
    setting = re.split(r"[.\[]", key, maxsplit=1)[0]
    return PackError(f"{place}: {text}", code, setting, where)


def _mistyped(expected: str, value: Any, key: str, where: str) -> PackError:
    return setting_error(f"must be {expected}, but is {value!r}.", key, where)
