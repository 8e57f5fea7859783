"""Values of settings from files and flags, each converted to the type of its field."""

import dataclasses
import re
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ..errors import Code, PackError, did_you_mean, flag_of
from ..reading import read_json, read_yaml
from .fields import Settings
from .other_names import OTHER_NAMES

S = TypeVar("S", bound=Settings)

# Keys of recipes, manifests (`measured`) and reports, as older versions wrote them.
RENAMED_KEYS = {
    "base_path": "matmul_path",
    "base_path_ms": "matmul_path_ms",
    "base_paths_at_work": "matmul_paths",
    "cache_prefix": "cache_frozen",
}

_NUMBERS = {int: "an integer", float: "a number"}
_KINDS = {bool: "true or false", str: "text", dict: "a mapping", list: "a list", **_NUMBERS}


def typed_value(value: Any, kind: Any, key: str, where: str = "") -> Any:
    """``value`` as ``kind``; integers pass for floats, and texts for the numbers that they spell.

    Args:
        value: as a file, a flag or Python has it.
        kind: type of a field: a class, a union, ``tuple[X, ...]`` or ``dict[str, X]``.
        key: the setting, or where in it the value is (``rank_pattern.q_proj``).
        where: the file; empty for flags and Python.

    Raises:
        PackError: the value is of another type.
    """
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        kinds = tuple(part for part in parts if part is not types.NoneType)
        if value is None and types.NoneType in parts:
            return None
        if len(kinds) == 1:
            return typed_value(value, kinds[0], key, where)
        if isinstance(value, kinds):
            return value
        raise _mistyped(" or ".join(_KINDS[kind] for kind in kinds), value, key, where)
    if origin is tuple:
        return _items(value, parts[0], key, where)
    if origin is dict:
        value = _pairs(value, key, where) if isinstance(value, str) else value
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
    elif kind not in _NUMBERS and isinstance(value, kind):
        return value
    elif dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        settings = {str(k): v for k, v in value.items()}
        return build(kind, settings, f"{where}: {key}" if where else key)
    raise _mistyped(_KINDS.get(kind, "a mapping"), value, key, where)


def _items(value: Any, kind: Any, key: str, where: str) -> tuple:
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)):
        raise _mistyped("a list", value, key, where)
    items = [item.strip() if isinstance(item, str) else item for item in items]
    return tuple(
        typed_value(item, kind, f"{key}[{i}]", where) for i, item in enumerate(items) if item != ""
    )


def _pairs(text: str, key: str, where: str) -> dict[str, str]:
    """``a=8,b=2`` as a flag has it; in YAML it is a mapping."""
    pairs = [part.rpartition("=") for part in text.split(",") if part.strip()]
    if not all(name.strip() and value.strip() for name, _, value in pairs):
        raise _mistyped("of the form name=number,name=number", text, key, where)
    names = [name.strip() for name, _, _ in pairs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise setting_error(f"has two values for '{twice}'. Give one.", key, where, "conflict")
    return {name.strip(): value.strip() for name, _, value in pairs}


def build(cls: type[S], values: Mapping[str, Any], where: str = "") -> S:
    """``cls(**values)`` with every value typed.

    Args:
        cls: the configuration.
        values: by the names of its fields.
        where: the file; empty for flags and Python.

    Raises:
        PackError: a key is unknown, or a value is wrong.
    """
    kinds = typing.get_type_hints(cls)
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
        raise PackError(f"{where}: {error}", error.code, error.flag) from None


def setting_error(text: str, key: str, where: str = "", code: Code = "invalid") -> PackError:
    """Return the error of a setting, which begins with its file and key, or with its flag.

    Args:
        text: what is wrong and what to do.
        key: the setting, or where in it the fault is (``rank_pattern.q_proj``).
        where: the file; empty for flags and Python.
        code: the kind of error.
    """
    place = f"{where}: {key}" if where else flag_of(key) if key.isidentifier() else key
    return PackError(f"{place}: {text}", code, re.split(r"[.\[]", key, maxsplit=1)[0])


def _mistyped(expected: str, value: Any, key: str, where: str) -> PackError:
    return setting_error(f"must be {expected}, but is {value!r}.", key, where)


def unknown_setting(key: Any, valid: Iterable[str], where: str, parent: str = "") -> PackError:
    """Return the error for a key that is no setting; ``parent`` is the mapping that it is in."""
    valid = list(valid)
    if renamed := RENAMED_KEYS.get(key):
        hint = f"It is called '{renamed}' now."
    elif (ours := OTHER_NAMES.get(str(key).replace("-", "_"))) in valid:
        hint = f"It is called '{ours}' here."
    else:
        hint = did_you_mean(str(key), valid)
    message = f"{where and where + ': '}{parent}{key}: is not a setting. {hint}"
    return PackError(message, "unknown", key)


def current_keys(values: Mapping) -> dict:
    """Mapping of a file that an older version wrote, with today's name for every key."""
    return {RENAMED_KEYS.get(key, key): value for key, value in values.items()}


def read_settings(path: str | Path) -> dict:
    """Return the mapping in a YAML or JSON file.

    Raises:
        PackError: the file cannot be read, or contains something else.
    """
    path = Path(path)
    try:
        values = read_json(path, object) if path.suffix == ".json" else read_yaml(path)
    except OSError as error:
        code = "not-found" if isinstance(error, FileNotFoundError) else "unreadable"
        raise PackError(f"{path}: cannot be read ({error.strerror}).", code, "config") from None
    except PackError as error:
        raise PackError(error.message, error.code, "config") from error
    if not isinstance(values, dict | None):
        message = f"{path}: must be a mapping of settings, but is a {type(values).__name__}."
        raise PackError(message, "unreadable", "config")
    return values or {}
