"""The labels of rows, and the classes that a classifier decides between.

A row has one label, several labels or a score besides its text or messages, as data sets of the
Hub have them.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ..config.data import DataConfig
from ..errors import PackError
from .formats import CHAT, TEXT, Row, RowFormat, check_unicode, format_of, shown, text_of
from .row_format import BadRows, list_of, number_of, optional
from .sources import data_error
from .task_formats import LABEL_COLUMNS

# What is decided; all but one are transformers' names.
SINGLE = "single_label_classification"
MULTI = "multi_label_classification"
REGRESSION = "regression"
ORDINAL = "ordinal"  # one label of a scale

# By the column of a row.
PROBLEMS = dict(zip(LABEL_COLUMNS, (SINGLE, MULTI, REGRESSION), strict=True))
COLUMNS = {problem: column for column, problem in PROBLEMS.items()} | {ORDINAL: "label"}
MOST_CLASSES = 5_000  # a head of that many rows is already as large as many an adapter
INPUTS: tuple[RowFormat, ...] = (CHAT, TEXT)  # what is classified
_INTEGER = re.compile(r"[+-]?\d{1,18}")  # Python converts no more than 4300 digits

Label = str | tuple[str, ...] | float  # of a row: by the problem


@dataclass(frozen=True)
class Classes:
    """What a classifier decides between, and how it reads its input.

    Attributes:
        problem: `SINGLE`, `ORDINAL` or `MULTI` labels, or the `REGRESSION` of a score.
        labels: names of the classes in the order of the logits; a score has none.
        chat: whether the input is the prompt of a chat, in which a text is the user's message.
        temperature: what logits are divided by before they become probabilities.
    """

    problem: str
    labels: tuple[str, ...] = ()
    chat: bool = False
    temperature: float = 1.0

    @property
    def outputs(self) -> int:
        """The number of logits of an example."""
        return max(1, len(self.labels))

    @property
    def head_rows(self) -> int:
        """The rows of the head: of a scale one for each label but the lowest."""
        if self.problem == ORDINAL:
            return len(self.labels) - 1
        return self.outputs

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The number of each class by its label."""
        return {label: number for number, label in enumerate(self.labels)}

    def to_json(self) -> dict[str, Any]:
        """Return the part ``classifier`` of a manifest."""
        return {
            "problem_type": self.problem,
            "labels": list(self.labels),
            "head": "score",
            "input": "chat" if self.chat else "text",
            "temperature": self.temperature,
        }

    @classmethod
    def of(cls, manifest: Mapping) -> "Classes | None":
        """Return the classes of a pack; None if it is no classifier."""
        stored = manifest.get("classifier")
        if stored is None:
            return None

        return cls(
            stored["problem_type"],
            tuple(stored["labels"]),
            stored["input"] == "chat",
            float(stored.get("temperature", 1.0)),
        )

    def encoded(self, values: Sequence[Any]) -> np.ndarray:
        """Return what the loss compares with: int32 [N], bool [N, classes], or float32 [N]."""
        if self.problem == REGRESSION:
            return np.array(values, np.float32)

        if self.problem != MULTI:
            return np.array([self.numbers[label] for label in values], np.int32)

        present = np.zeros((len(values), len(self.labels)), bool)
        for row, labels in enumerate(values):
            present[row, [self.numbers[label] for label in labels]] = True
        return present

    def on_scale(self) -> "Classes":
        """Return the classes as `ORDINAL`, the lowest first; a PackError if they have no order."""
        column = COLUMNS[self.problem]
        if column != "label":
            text = f"--ordinal: does not apply to examples with '{column}'. Leave it out."
            raise PackError(text, "conflict", "ordinal")

        texts = [label for label in self.labels if not _INTEGER.fullmatch(label)]
        if texts:
            raise PackError(
                f"--ordinal: the label {shown(texts[0])} is no integer, so the order of the labels "
                "is not known. Write them as integers, such as 1 to 5.",
                "data",
                "ordinal",
            )
        return replace(self, problem=ORDINAL, labels=tuple(sorted(self.labels, key=int)))

    def check(self, row: Row, label: Label) -> None:
        """Raise a RowError if a label is none of the classes."""
        if self.problem == REGRESSION:
            return

        for each in _each(label):
            if each not in self.numbers:
                known = ", ".join(map(repr, self.labels[:5]))
                if len(self.labels) > 5:
                    known += ", …"
                fault = f"the label {shown(each)} is none of the {len(self.labels)} that were "
                raise row.error(f"{fault}trained on ({known}).", "unknown label")


def probabilities(logits: np.ndarray, problem: str) -> np.ndarray:
    """Return the probabilities of labels, of logits float64 [N, classes]; scores stay as they are.

    One label: softmax. Several labels: the sigmoid of each.
    """
    if problem == REGRESSION:
        return logits
    if problem == MULTI:
        return np.exp(-np.logaddexp(0, -logits))
    return np.exp(logits - np.logaddexp.reduce(logits, axis=1)[:, None])


def _each(label: Label) -> tuple:
    if isinstance(label, tuple):
        return label
    return (label,)


def label_column(row: Row) -> str:
    """Return the column of a row that has its label; a RowError unless there is one of them."""
    columns = [column for column in PROBLEMS if optional(row, column) is not None]
    if len(columns) == 1:
        return columns[0]

    names = "'label' (one), 'labels' (a list) or 'score' (a number)"
    fault = f"must have {names}, but has none of them."
    if columns:
        fault = f"must have one of {names}, but has {' and '.join(columns)}."
    raise row.error(fault, "missing columns", "task")


def read_label(row: Row, column: str) -> Label:
    """Return the label, the labels or the score of a row, or raise the RowError that it has."""
    if column not in row.value:
        raise row.error(f"'{column}' is missing.", "missing columns")

    if column == "score":
        return number_of(row, column)

    if column == "label":
        return _name(row, column, row.value[column])

    names = [_name(row, column, each) for each in list_of(row, column)]
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        fault = f"'{column}' has {shown(repeated[0])} more than once."
        if set(names) <= {"0", "1"}:
            fault = f"'{column}' must name the labels that apply, but has a mark for each label."
        raise row.error(f"{fault} List each label that applies once.", "wrong type")

    return tuple(names)


def _name(row: Row, column: str, value: Any) -> str:
    """Return the name of a label: a text, or an integer as text."""
    if isinstance(value, float) and value.is_integer():  # as pandas has integers beside NaN
        return str(int(value))
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        fault = f"'{column}' must be a text or an integer, but is {shown(value)}."
        raise row.error(fault, "wrong type")
    if not value.strip():
        raise row.error(f"'{column}' is empty.", "empty")

    check_unicode(row, value)
    return value


def check_input(row: Row, names: DataConfig) -> RowFormat:
    """Return whether a row is a text or a chat; a RowError if it says nothing."""
    row_format = format_of(row, names, INPUTS)
    (column,) = row_format.columns(names)
    if row_format is TEXT:
        text_of(row, column)
    else:
        CHAT.read(row, names)  # which names what is wrong
    if not any(text.strip() for text in row_format.texts(row, names)):
        raise row.error(f"'{column}' is empty.", "empty")
    return row_format


def find_classes(rows: Iterable[Row], names: DataConfig, source: str) -> Classes:
    """Return the classes of training rows: texts in order, or integers in theirs.

    Rows that cannot be used are left to the encoding, unless they stop the run.
    """
    column = ""
    first_format = None
    seen: dict[Any, None] = {}
    in_all: set[Any] = set()  # labels that every row has

    def read(row: Row) -> tuple[RowFormat, Label]:
        nonlocal column
        row_format = check_input(row, names)
        column = column or label_column(row)
        return row_format, read_label(row, column)

    bad = BadRows(names.on_bad_row == "stop")
    for _, _, (row_format, label) in bad.usable(rows, read):
        labels = _each(label)
        in_all = in_all.intersection(labels) if seen else set(labels)
        first_format = first_format or row_format
        seen |= dict.fromkeys(labels)

    _check_count(len(seen), column, source)
    if len(in_all) == len(seen):
        raise data_error(
            source,
            f"every training example has all {len(seen)} labels, so there is nothing to tell "
            "apart. List only the labels that apply to an example.",
        )

    problem = PROBLEMS[column]
    classes = Classes(problem, chat=first_format is CHAT)
    if problem == REGRESSION:
        return classes
    are_integers = all(map(_INTEGER.fullmatch, seen))
    return replace(classes, labels=tuple(sorted(seen, key=int if are_integers else None)))


def _check_count(count: int, column: str, source: str) -> None:
    fault = ""
    if count < 2:
        fault = (
            f"the training examples have {count} '{column}' in all, so there is nothing to tell "
            "apart. Add examples of another one."
        )
    if column != "score" and count > MOST_CLASSES:
        fault = (
            f"the training examples have {count:,} different labels, and at most {MOST_CLASSES:,} "
            "are supported: most would have too few examples to be learned. Join rare ones, or "
            "train embeddings and look for the nearest (--task embedding)."
        )
    if fault:
        raise data_error(source, fault)
