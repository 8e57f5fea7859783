"""A row as it was read, and the interface of its formats."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ..config.data import DataConfig
from ..errors import Code, PackError
from .bad_rows import RowError


@dataclass(frozen=True)
class Row:
    """One row as it was read, with the place that messages name (``train.jsonl:17``).

    ``folder`` is that of its file, which paths in the row are relative to.
    """

    where: str
    value: Mapping
    folder: Path | None = None

    def with_value(self, value: Mapping) -> "Row":
        """Return other columns as a row of the same place."""
        return Row(self.where, value, self.folder)

    def error(self, fault: str, reason: str, flag: str | None = None) -> RowError:
        """Return the error of a row that cannot be used, which ``--on-bad-row`` may leave out."""
        return RowError(self.where, fault, reason, flag=flag)

    def conflict(self, fault: str, code: Code, flag: str | None = None) -> PackError:
        """Return an error of a setting or of the base model, which this row shows."""
        return PackError(f"{self.where}: {fault}", code, flag)


class RowFormat(ABC):
    """A kind of row, recognized by its columns; ``name`` is what reports and manifests call it."""

    name: ClassVar[str]
    other_names: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # that a column may have

    @abstractmethod
    def columns(self, names: DataConfig) -> tuple[str, ...]:
        """Return the columns that a row of this format has."""

    @abstractmethod
    def texts(self, row: Row, names: DataConfig) -> list[str]:
        """Return every text of a row, for what needs texts of whatever kind."""

    def optional_columns(self, names: DataConfig) -> tuple[str, ...]:
        """Return other columns that are read if a row has them."""
        return ()

    def column(self, row: Row, name: str) -> str:
        """Return the name that a column has in a row; without such a column its own."""
        if name not in self.other_names:
            return name

        present = [each for each in (name, *self.other_names.get(name, ())) if each in row.value]
        filled = (each for each in present if optional(row, each) is not None)
        return next(filled, next(iter(present), name))

    def values(self, row: Row, names: DataConfig) -> list[Any]:
        """Return the values of the columns of a row that `matches`."""
        return [row.value[self.column(row, name)] for name in self.columns(names)]

    def used(self, row: Row, names: DataConfig) -> set[str]:
        """Return the columns that are read; a row need not have all of them."""
        columns = {self.column(row, name) for name in self.columns(names)}
        return columns | set(self.optional_columns(names))

    def matches(self, row: Row, names: DataConfig) -> bool:
        return all(self.column(row, name) in row.value for name in self.columns(names))

    def grouped(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Return rows with those joined that are one example."""
        return rows

    def resembles(self, row: Row, names: DataConfig) -> bool:
        """Return whether a row of another task may be meant to have this format."""
        return self.matches(row, names)


def check_unicode(row: Row, text: str) -> None:
    """Raise a RowError if a text cannot be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        fault = "has half of a surrogate pair (\\ud800 to \\udfff)."
        raise row.error(fault, "half a surrogate pair") from None


def text_of(row: Row, column: str) -> str:
    if not isinstance(text := row.value[column], str):
        raise row.error(f"'{column}' must be a text, but is {shown(text)}.", "wrong type")
    return text


def optional(row: Row, column: str) -> Any:
    """Return the value of a column; None where it is missing or empty, as NaN is in pandas."""
    value = row.value.get(column)
    if is_missing(value) or (isinstance(value, str) and not value):
        return None
    return value


def is_missing(value: Any) -> bool:
    """Whether a value is null, or NaN, as pandas has it."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def shown(value: Any) -> str:
    """Return the beginning of a value; not even an integer of a million digits is an error."""
    try:
        return f"{value!r:.60}"
    except (ValueError, RecursionError):
        return f"a {type(value).__name__}"


def plain(value: Any) -> Any:
    """Turn the numbers and arrays of NumPy into Python's."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist") and hasattr(value, "dtype"):
        return plain(value.tolist())
    return value
