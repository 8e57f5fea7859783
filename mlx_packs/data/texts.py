"""Examples of several texts each, as those of a pair, or of a query with each document."""

import hashlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..config.data import DataConfig
from .dataset import Batch, ExampleSet, edges_of
from .formats import Row, RowFormat, check_format, first_format
from .row_format import BadRows
from .shapes import padded_length
from .sources import as_rows, canonical_line
from .token_store import StoredExamples, TokenStore

_TEXTS_AT_A_TIME = 1024
NAMES = DataConfig()  # such rows have column names of their own

# Tokens int32 [L] of each text, and whether it was cut.
Encoding = Callable[[Sequence[str]], Iterable[tuple[np.ndarray, bool]]]
# The texts of an example, and what is known of it: a number for each text, a single one, or none.
Group = tuple[Sequence[str], Sequence[float]]


@dataclass
class TextGroups(ExampleSet):
    """The examples of a split: groups of texts, whose tokens are stored."""

    format: Any  # of the rows
    stored: StoredExamples  # the tokens of each text; equal texts are one
    groups: np.ndarray  # int64 [N, C], the texts of each example; -1 if it has fewer than C
    labels: np.ndarray | None  # float32 [N] of examples, [N, C] of texts (-1 if there is none)
    cut: int  # texts that were too long
    bad: BadRows = field(default_factory=BadRows)  # rows that were left out
    where: Callable[[int], str] = str  # the row of an example, as messages name it
    fingerprint: str | None = None  # of the rows in use

    def __len__(self) -> int:
        return len(self.groups)

    def tokens(self, i: int) -> list[np.ndarray]:
        """Return the tokens of each text of an example, int32 [L]."""
        return [self.stored[text].tokens for text in self.groups[i].tolist() if text >= 0]

    def select(self, chosen: np.ndarray) -> "TextGroups":
        return replace(
            self,
            groups=self.groups[chosen],
            labels=None if self.labels is None else self.labels[chosen],
            where=lambda i: self.where(int(chosen[i])),
        )

    def distinct(self) -> tuple[list[np.ndarray], np.ndarray]:
        """Return the tokens of every text once, and which of them examples have, [N, C] or -1."""
        numbers = np.unique(self.groups[self.groups >= 0])
        places = np.searchsorted(numbers, self.groups)
        tokens = [self.stored[text].tokens for text in numbers.tolist()]
        return tokens, np.where(self.groups < 0, -1, places)

    @property
    def sizes(self) -> np.ndarray:
        """Texts of each example, [N]."""
        return (self.groups >= 0).sum(axis=1)

    @property
    def text_lengths(self) -> np.ndarray:
        """Tokens of each text, [N, C]; 0 where there is none."""
        return np.where(self.groups < 0, 0, self.stored.lengths[self.groups])

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of the longest text of each example, [N]."""
        return self.text_lengths.max(axis=1)


def encode_groups(
    rows: Sequence[Row],
    formats: Sequence[RowFormat],
    on_bad_row: str,
    groups_of: Callable[[Row, Any], Sequence[Group]],
    encoding: Encoding,
) -> TextGroups:
    """Return the examples of a split: of each row those of ``groups_of``, by its format.

    A row that cannot be used is a RowError, unless ``on_bad_row`` leaves such rows out.
    """
    first, row_format = first_format(rows, replace(NAMES, on_bad_row=on_bad_row), formats)
    rows = row_format.grouped(rows)
    where = as_rows(rows).where
    bad = BadRows(on_bad_row == "stop")
    fingerprint = hashlib.sha256()
    texts = _TextStore(encoding)
    used = array("q")
    sizes = array("q")
    numbers = array("q")
    labels = array("f")

    def read(row: Row) -> Sequence[Group]:
        check_format(row, row_format, first.where, NAMES, formats)
        return groups_of(row, row_format)

    for i, row, groups in bad.usable(rows, read):
        fingerprint.update(canonical_line(row))
        for group, known in groups:
            used.append(i)
            sizes.append(len(group))
            numbers.extend(map(texts.number, group))
            labels.extend(known)

    stored, is_cut = texts.stored()
    by_example = _by_example(np.array(numbers), sizes)
    known = np.array(labels, np.float32)
    if len(known) == len(numbers):
        known = _by_example(known, sizes)
    return TextGroups(
        row_format,
        stored,
        by_example,
        known if len(known) else None,
        int(is_cut[np.array(numbers)].sum()),
        bad,
        lambda example: where(used[example]),
        fingerprint.hexdigest(),
    )


def _by_example(values: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """Return the values of N examples, one after the other, as [N, C]; -1 where there is none."""
    sizes = np.array(sizes)
    result = np.full((len(sizes), sizes.max()), -1, values.dtype)
    result[np.arange(sizes.max()) < sizes[:, None]] = values
    return result


class _TextStore:
    """Different texts, tokenized some at a time; a text of several examples is stored once."""

    def __init__(self, encoding: Encoding) -> None:
        self._encoding = encoding
        self._numbers: dict[bytes, int] = {}  # by hash: the texts themselves are not stored
        self._waiting: list[str] = []
        self._store = TokenStore()
        self._is_cut = array("b")

    def number(self, text: str) -> int:
        key = hashlib.blake2b(text.encode(), digest_size=16).digest()
        number = self._numbers.setdefault(key, len(self._numbers))

        if number == len(self._store) + len(self._waiting):
            self._waiting.append(text)
            if len(self._waiting) == _TEXTS_AT_A_TIME:
                self._encode()

        return number

    def stored(self) -> tuple[StoredExamples, np.ndarray]:
        """Return the tokens of each text, and whether it was cut, bool [texts]."""
        self._encode()
        return self._store.examples(str), np.array(self._is_cut, bool)

    def _encode(self) -> None:
        for tokens, is_cut in self._encoding(self._waiting):
            self._is_cut.append(is_cut)
            self._store.add(len(self._store), tokens, np.zeros(0, bool))
        self._waiting = []


@dataclass(frozen=True)
class TextCollate:
    """Lays out examples of several texts each, which are padded alike."""

    batch_size: int  # examples
    limit: int  # most tokens of a text
    powers: bool = False  # whether lengths are 32, 64, 128, ..., so that few occur

    def width(self, longest: int) -> int:
        if self.powers:
            longest = 32 << max(0, (longest - 1).bit_length() - 5)
        return min(padded_length(longest, self.limit), self.limit)

    def batch(
        self, inputs: dict[str, np.ndarray], texts: TextGroups, order: Sequence[int]
    ) -> Batch:
        """Return arrays, whose first axis is that of examples, as a batch."""
        return Batch(inputs, len(order), len(order), tuple(int(i) for i in order), texts)

    def split(self, batch: Batch, parts: int) -> list[Batch]:
        pieces = []
        for start, stop in edges_of(len(batch.inputs["lengths"]), parts):
            inputs = {name: values[start:stop] for name, values in batch.inputs.items()}
            examples = batch.examples[start:stop]
            counts = {"targets": len(examples), "denominator": len(examples)}
            pieces.append(replace(batch, inputs=inputs, examples=examples, **counts))
        return pieces
