"""A row as it was read, its cells, the interface of its formats, and the error of a bad row.

One reader of cells serves all tasks and kinds of files, in some of which every cell is text.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from ..config.data import COLUMN_SETTINGS, DataConfig
from ..errors import Code, PackError
from ..reading import depth_of

TOO_LONG = "images beyond --max-seq-length"  # the reason of such a row

R = TypeVar("R")  # a row
T = TypeVar("T")  # its content
_MOST_NUMBER = 3e38  # of float32
MOST_DEPTH = 100  # of lists and objects within one another
_TRUTHS = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}
_METADATA = b"huggingface"  # key of a parquet file that `datasets` has written
_MESSAGE_KEYS = ({"role", "content"}, {"role", "tool_calls"}, {"from", "value"})


class RowError(PackError):
    """An example cannot be used; ``--on-bad-row`` decides whether that stops the run.

    ``where`` is the row, as ``train.jsonl:17``. Rows are counted by ``reason``, a few words such as
    ``not JSON``. With ``missing columns`` it has the ``columns`` of the row, else none.
    """

    columns: Sequence[str] = ()

    def __init__(
        self,
        where: str,
        fault: str,
        reason: str,
        code: Code = "data",
        flag: str | None = None,
    ) -> None:
        super().__init__(fault, code, flag, where=where)
        self.reason = reason

    def to_json(self) -> dict[str, Any]:
        report = super().to_json()
        report["error"]["columns"] = [*self.columns]
        return report


# Is called with number and error of each row as soon as it is left out.
LEFT_OUT: ContextVar[Callable[[int, RowError], object]] = ContextVar("", default=lambda *_: None)


@dataclass
class BadRows:
    """The rows of a split that cannot be used, in their order."""

    stops: bool = True  # whether the first one is raised as an error (``--on-bad-row stop``)
    per_row: int = 1  # examples of a row
    _errors: dict[int, RowError] = field(default_factory=dict)  # the first of each row

    @property
    def errors(self) -> list[tuple[int, RowError]]:
        """The number of each row and its error, by row: they may be found in another order."""
        return sorted(self._errors.items(), key=lambda entry: entry[0])

    def add(self, example: int, error: RowError) -> None:
        """Record the row of an example, or raise its error if rows stop the run."""
        if self.stops:
            raise error
        error.__traceback__ = None  # of a million rows the frames would stay
        row = example // self.per_row
        if row not in self._errors:
            self._errors[row] = error
            LEFT_OUT.get()(row, error)

    def usable(self, rows: Iterable[R], read: Callable[[R], T]) -> Iterator[tuple[int, R, T]]:
        """Yield the number of each row, the row, and what ``read`` returns for it.

        A row for which it raises a RowError is added; if no row is left, that is a PackError.
        """
        count = 0
        for count, row in enumerate(rows, 1):
            try:
                value = read(row)
            except RowError as error:
                self.add(count - 1, error)
            else:
                yield count - 1, row, value

        if not count:
            raise PackError("--data: the split has no examples.", "data")
        self.check_some_left(count)

    def __len__(self) -> int:
        return len(self._errors)

    def counts(self) -> dict[str, int]:
        return dict(Counter(error.reason for error in self._errors.values()).most_common())

    def check_some_left(self, count: int) -> None:
        """Raise a PackError if all of ``count`` rows are bad."""
        if not self._errors or len(self) < count:
            return

        flag = "data"
        reasons = self.counts()
        fault = f"--on-bad-row: none of {count:,} examples can be used ({shown_counts(reasons)})."
        if set(reasons) == {TOO_LONG}:
            flag = "max_seq_length"
            fault = "--max-seq-length: no example fits with its images."

        first = self.errors[0][1]
        raise PackError(f"{fault} The first: {first.message}", "data", flag)

    def to_json(self) -> list:
        """`add_json` reads it; the places of rows are left out."""
        return [[i, e.text, e.reason, e.code, e.flag] for i, e in self.errors]

    def add_json(self, entries: Iterable, where: Callable[[int], str]) -> None:
        """Add rows of `to_json`; ``where`` returns the place of an example."""
        for row, fault, reason, code, flag in entries:
            example = row * self.per_row
            self.add(example, RowError(where(example), fault, reason, code, flag))


def all_too_long(where: str, fault: str) -> RowError:
    """Return the error of a split in which no example ``fault``."""
    return RowError(where, f"no example {fault}", "no target", flag="max_seq_length")


def shown_counts(counts: Mapping[str, int]) -> str:
    """Return counts for people: ``2 not JSON, 1 no target``."""
    return ", ".join(f"{count:,} {reason}" for reason, count in counts.items())


@dataclass(frozen=True)
class Row:
    """One row as it was read, with the place that messages name (``train.jsonl:17``).

    ``folder`` is its file's, which paths in the row are relative to.
    """

    where: str
    value: Mapping
    folder: Path | None = None

    def with_value(self, value: Mapping) -> "Row":
        """Return other columns as a row of the same place."""
        return Row(self.where, value, self.folder)

    @contextmanager
    def faults(self, reason: str = "wrong type") -> Iterator[None]:
        """Raise a ValueError as the error of this row."""
        try:
            yield
        except ValueError as error:
            raise self.error(str(error), reason) from None

    def error(self, fault: str, reason: str, flag: str | None = None) -> RowError:
        """Return the error of a row that cannot be used, which ``--on-bad-row`` may leave out."""
        return RowError(self.where, fault, reason, flag=flag)

    def conflict(self, fault: str, code: Code, flag: str | None = None) -> PackError:
        """Return an error of a setting or of the base model, which this row shows."""
        return PackError(fault, code, flag, self.where)


class LazyRow(Row):
    """A row whose columns are read when they are first used; a RowError if they cannot be."""

    def __init__(self, where: str, read: Callable[[], Mapping], folder: Path | None = None) -> None:
        object.__setattr__(self, "where", where)
        object.__setattr__(self, "folder", folder)
        object.__setattr__(self, "read", read)

    @cached_property
    def value(self) -> Mapping:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.read()


@dataclass(frozen=True, eq=False)
class RowFormat:
    """A kind of row, recognized by its columns; a setting such as ``text_feature`` may name one.

    Attributes:
        name: What reports and manifests call it.
        required: Columns that a row of this format has.
        optional: Other columns that are read if a row has them.
        one_of: Columns of which a row has a value in one or more.
        with_texts: Columns that texts are in; by default the required ones.
        other_names: Other names that a column may have.
    """

    name: str
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    one_of: tuple[str, ...] = ()
    with_texts: tuple[str, ...] = ()
    other_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def columns(self, names: DataConfig) -> tuple[str, ...]:
        """Return the columns that a row of this format has."""
        return _named_columns(self.required, names)

    def column(self, row: Row, name: str) -> str:
        """Return the name that a column has in a row; without such a column its own."""
        if name not in self.other_names:
            return name

        present = [each for each in (name, *self.other_names.get(name, ())) if each in row.value]
        filled = (each for each in present if optional(row, each) is not None)
        return next(filled, next(iter(present), name))

    def text_columns(self, row: Row, names: DataConfig) -> list[str]:
        """Return the columns of a row that its texts are in; a row need not have all of them."""
        columns = _named_columns(self.with_texts or self.required, names)
        return [self.column(row, name) for name in columns]

    def texts(self, row: Row, names: DataConfig) -> list[str]:
        """Return every text of a row, for what needs texts of whatever kind."""
        values = (row.value.get(column) for column in self.text_columns(row, names))
        return [text for value in values for text in _texts_in(value)]

    def used(self, row: Row, names: DataConfig) -> set[str]:
        """Return the columns that are read; a row need not have all of them."""
        return {*self.text_columns(row, names), *self.optional}

    def matches(self, row: Row, names: DataConfig) -> bool:
        if self.one_of and all(optional(row, column) is None for column in self.one_of):
            return False
        return all(self.column(row, name) in row.value for name in self.columns(names))


def _named_columns(columns: Sequence[str], names: DataConfig) -> tuple[str, ...]:
    return tuple(getattr(names, each) if each in COLUMN_SETTINGS else each for each in columns)


def check_unicode(row: Row, text: str) -> None:
    """Raise a RowError if a text cannot be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        fault = "has half of a surrogate pair (\\ud800 to \\udfff)."
        raise row.error(fault, "half a surrogate pair") from None


def text_of(row: Row, column: str) -> str:
    if not isinstance(text := row.value[column], str):
        raise wrong_type(row, column, "a text")
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


def unpacked(value: Any) -> Any:
    """Return the list or object that a text is the JSON of; another value stays as it is."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value

    with suppress(ValueError, RecursionError):
        if depth_of(content := json.loads(value)) <= MOST_DEPTH:
            return content
    return value


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


def _texts_in(value: Any) -> list[str]:
    """Return a text, the texts of a list, or the contents of messages."""
    value = messages_of(value)
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        value = [value.get(key) for key in ("content", "value", "text")]
    if not isinstance(value, (list, tuple)):
        return []
    return [text for item in value for text in _texts_in(item)]


def wrong_type(row: Row, column: str, kind: str, advice: str = "") -> RowError:
    fault = f"'{column}' must be {kind}, but is {shown(plain(row.value[column]))}.{advice}"
    return row.error(fault, "wrong type")


def list_of(row: Row, column: str) -> list:
    """Return a list, or raise a RowError."""
    value = plain(unpacked(row.value[column]))
    if not isinstance(value, list):
        advice = " Write it as JSON, in square brackets." if isinstance(value, str) else ""
        raise wrong_type(row, column, "a list", advice)
    return value


def texts_of(row: Row, column: str) -> list[str]:
    """Return a list of texts with something in it; a text is one, unless the column is plural."""
    values = plain(unpacked(row.value[column]))
    if isinstance(values, str) and (column in ("pos", "docs") or not column.endswith("s")):
        values = [values]

    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise wrong_type(row, column, "a text or a list of texts")
    if not values:
        raise row.error(f"'{column}' is empty.", "empty")
    return values


def number_of(row: Row, column: str) -> float:
    """Return a finite number of float32, or raise a RowError."""
    number = as_number(row.value[column])
    if number is None or abs(number) > _MOST_NUMBER:
        raise wrong_type(row, column, "a number")
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
        raise wrong_type(row, column, "true or false")
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
