"""Formats of rows that embeddings are trained on."""

from collections.abc import Iterator
from typing import ClassVar, NamedTuple

from ..config.choices import LOSSES
from ..config.data import DataConfig
from .cells import number_of, texts_of
from .row_format import Row, RowFormat, check_unicode, shown, text_of
from .task_formats import (
    NEGATIVE_NAMES,
    POSITIVE_NAMES,
    RELEVANCE_NAMES,
    negative_columns,
    negatives_of,
)

_MOST_SCORE = 3e38  # of float32
MOST_NEGATIVES = 32  # of an anchor


class Pair(NamedTuple):
    """The texts of an example, by column, and the score of a scored pair."""

    texts: list[str]
    score: float | None = None


class PairFormat(RowFormat):
    """Rows of sentence-transformers, which an encoder trains on."""

    text_columns: ClassVar[tuple[str, ...]]
    score_column: ClassVar[str | None] = None  # None where rows have no score

    @property
    def has_anchors(self) -> bool:
        """Whether the first text of a row is a query, which the others answer."""
        return "anchor" in self.text_columns

    @property
    def has_negatives(self) -> bool:
        """Whether every row has negatives of its own."""
        return "negative" in self.text_columns

    @property
    def losses(self) -> list[str]:
        """The losses that the columns suffice for; the first is what ``auto`` takes."""
        return [
            name
            for name, facts in LOSSES.items()
            if facts.scored == bool(self.score_column) and facts.texts <= len(self.text_columns)
        ]

    def columns(self, names: DataConfig) -> tuple[str, ...]:
        if not self.score_column:
            return self.text_columns
        return (*self.text_columns, self.score_column)

    def texts(self, row: Row, names: DataConfig) -> list[str]:
        return [text for column in self.text_columns for text in self._texts(row, column)]

    def usable(self, row: Row) -> Iterator[Pair]:
        """Yield a pair for each positive of a row; a RowError says what is wrong with it."""
        columns = [self._texts(row, column) for column in self.text_columns]
        for name, texts in zip(self.text_columns, columns, strict=True):
            for text in texts:
                check_unicode(row, text)
                if not text.strip():
                    raise row.error(f"'{self.column(row, name)}' is empty.", "empty")

        score = self._score(row)
        (first,), seconds, *negatives = columns
        for second in seconds:
            yield Pair([first, second, *(text for texts in negatives for text in texts)], score)

    def _texts(self, row: Row, name: str) -> list[str]:
        """Return one text, of answers to an anchor one or several."""
        column = self.column(row, name)
        if name == "positive":
            return texts_of(row, column)
        if name == "negative":
            return negatives_of(row, column, MOST_NEGATIVES)

        return [text_of(row, column)]

    def _score(self, row: Row) -> float | None:
        if self.score_column is None:
            return None

        column = self.column(row, self.score_column)
        score = number_of(row, column)
        if abs(score) > _MOST_SCORE:
            fault = f"'{column}' must be a number, but is {shown(score)}."
            raise row.error(fault, "wrong type")

        return score


class ScoredPairs(PairFormat):
    """Two sentences and how alike they are."""

    name = "scored pairs"
    text_columns = ("sentence1", "sentence2")
    score_column = "score"
    other_names: ClassVar = {"score": ("label",)}


class Triplets(PairFormat):
    """An anchor, what belongs to it, and one text or more that does not."""

    name = "triplets"
    text_columns = ("anchor", "positive", "negative")
    other_names: ClassVar = {
        "anchor": ("query",),
        "positive": POSITIVE_NAMES,
        "negative": NEGATIVE_NAMES,
    }

    def used(self, row: Row, names: DataConfig) -> set[str]:
        return super().used(row, names) | set(negative_columns(row, self.column(row, "negative")))


class AnchorPairs(PairFormat):
    """An anchor and what belongs to it."""

    name = "pairs"
    text_columns = ("anchor", "positive")
    other_names: ClassVar = {
        "anchor": ("query",),
        "positive": (*POSITIVE_NAMES, "document", "documents", "passage"),
    }

    def matches(self, row: Row, names: DataConfig) -> bool:
        """Documents with labels do not all belong to the query."""
        is_document = self.column(row, "positive") in ("document", "documents", "passage")
        is_judged = any(column in row.value for column in RELEVANCE_NAMES)
        return super().matches(row, names) and not (is_document and is_judged)


PAIR_FORMATS: tuple[PairFormat, ...] = (ScoredPairs(), Triplets(), AnchorPairs())
