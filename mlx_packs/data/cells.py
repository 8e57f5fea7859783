"""Cells of rows: one reader for all tasks and kinds of files, in some of which all is text."""

import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from decimal import Decimal
from typing import Any

from .row_format import Row, plain, shown

MOST_DEPTH = 100  # of lists and objects within one another
_TRUTHS = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}
_METADATA = b"huggingface"  # key of a parquet file that `datasets` has written
_MESSAGE_KEYS = ({"role", "content"}, {"role", "tool_calls"}, {"from", "value"})


def unpacked(value: Any) -> Any:
    """Return the list or object that a text is the JSON of; another value stays as it is."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value

    with suppress(ValueError, RecursionError):
        if not is_deep(content := json.loads(value)):
            return content
    return value


def is_deep(value: object) -> bool:
    """Whether lists and objects are nested more than `MOST_DEPTH` deep."""
    level = [value]
    for _ in range(MOST_DEPTH + 1):
        values = (each.values() if isinstance(each, dict) else each for each in level)
        level = [v for inner in values for v in inner if isinstance(v, (dict, list))]
        if not level:
            return False
    return True


def messages_of(value: Any) -> Any:
    """Return the messages that a text is the JSON of; another text stays as it is."""
    messages = unpacked(value)
    if messages is value or not isinstance(messages, list) or not messages:
        return value

    for message in messages:
        if not isinstance(message, Mapping):
            return value
        if not any(keys <= message.keys() for keys in _MESSAGE_KEYS):
            return value
    return messages


def list_of(row: Row, column: str, of: str = "values") -> list:
    """Return a list, or raise a RowError."""
    value = plain(unpacked(row.value[column]))
    if not isinstance(value, list):
        fault = f"'{column}' must be a list of {of}, but is {shown(value)}."
        if isinstance(value, str):
            fault += " Write it as JSON, in square brackets."
        raise row.error(fault, "wrong type")

    return value


def texts_of(row: Row, column: str) -> list[str]:
    """Return a list of texts with something in it; a text is one, unless the column is plural."""
    values = plain(unpacked(row.value[column]))
    if isinstance(values, str) and (column in ("pos", "docs") or not column.endswith("s")):
        values = [values]

    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        fault = f"'{column}' must be a list of texts, but is {shown(values)}."
        if not isinstance(values, list):
            fault = f"'{column}' must be a text or a list of texts, but is {shown(values)}."
        raise row.error(fault, "wrong type")

    if not values:
        raise row.error(f"'{column}' is empty.", "empty")

    return values


def number_of(row: Row, column: str) -> float:
    """Return a finite number, or raise a RowError."""
    number = as_number(row.value[column])
    if number is None:
        fault = f"'{column}' must be a number, but is {shown(row.value[column])}."
        raise row.error(fault, "wrong type")

    return number


def as_number(value: Any) -> float | None:
    """Return a finite number; None if a value is none."""
    value = plain(value)
    if isinstance(value, (int, float, str, Decimal)) and not isinstance(value, bool):
        with suppress(ValueError, OverflowError):
            if math.isfinite(number := float(value)):
                return number
    return None


def truth_of(row: Row, column: str) -> bool:
    """Return a truth value, or raise a RowError."""
    truth = as_truth(row.value[column])
    if truth is None:
        fault = f"'{column}' must be true or false, but is {shown(row.value[column])}."
        raise row.error(fault, "wrong type")

    return truth


def as_truth(value: Any) -> bool | None:
    """Return a truth value, as a word or a number too; None if a value is none."""
    number = as_number(value)
    if number in (0, 1):
        return number == 1

    return _TRUTHS.get(str(plain(value)).strip().lower())


def label_names(features: Any) -> Callable[[Mapping], Mapping]:
    """Return what gives a row the names of its ``ClassLabel`` columns; -1 has none.

    ``features`` is a data set of `datasets`, or the JSON of its features; else rows stay as is.
    """
    features = getattr(features, "features", features)
    named: dict[str, list[str]] = {}
    if isinstance(features, Mapping):
        features = getattr(features, "to_dict", lambda: features)()
        named = {column: names for column, each in features.items() if (names := _names_of(each))}

    def with_names(row: Mapping) -> Mapping:
        if not named:
            return row
        return {**row, **{c: _named(named[c], row[c]) for c in named if c in row}}

    return with_names


def parquet_features(metadata: Mapping | None) -> Any:
    """Return the features that `datasets` writes into a parquet file; None without."""
    with suppress(ValueError, KeyError, TypeError):
        stored = unpacked((metadata or {})[_METADATA].decode())
        return stored["info"]["features"]

    return None


def _names_of(feature: Any) -> list[str] | None:
    """Return the names of a ``ClassLabel``, or of a list of them; None for another feature."""
    if isinstance(feature, list):
        feature = next(iter(feature), None)
    if isinstance(feature, Mapping) and "feature" in feature:
        feature = feature["feature"]
    if isinstance(feature, Mapping) and feature.get("_type") == "ClassLabel":
        return feature.get("names")
    return None


def _named(names: list[str], value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_named(names, each) for each in value]
    if not isinstance(value, int):
        return value
    if value < 0:
        return None
    return names[value] if value < len(names) else value
