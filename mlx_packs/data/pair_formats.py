"""Formats of rows that embeddings are trained on."""

from typing import ClassVar

from ..config.choices import LOSSES
from ..config.data import DataConfig
from .cells import number_of
from .row_format import Row, RowFormat, check_unicode, shown, text_of

_MOST_SCORE = 3e38  # of float32


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
        """Whether every row has a negative of its own."""
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
        return [text_of(row, column) for column in self.text_columns]

    def usable(self, row: Row, names: DataConfig) -> tuple[list[str], float | None]:
        """Return the texts of a row and its score, or the RowError that says what is wrong."""
        texts = self.texts(row, names)
        for column, text in zip(self.text_columns, texts, strict=True):
            check_unicode(row, text)
            if not text.strip():
                raise row.error(f"'{column}' is empty.", "empty")

        if self.score_column is None:
            return texts, None
        score = number_of(row, self.score_column)
        if abs(score) > _MOST_SCORE:
            fault = f"'{self.score_column}' must be a number, but is {shown(score)}."
            raise row.error(fault, "wrong type")
        return texts, score


class ScoredPairs(PairFormat):
    """Two sentences and how alike they are."""

    name = "scored pairs"
    text_columns = ("sentence1", "sentence2")
    score_column = "score"


class Triplets(PairFormat):
    """An anchor, what belongs to it, and what does not."""

    name = "triplets"
    text_columns = ("anchor", "positive", "negative")


class AnchorPairs(PairFormat):
    """An anchor and what belongs to it."""

    name = "pairs"
    text_columns = ("anchor", "positive")


PAIR_FORMATS: tuple[PairFormat, ...] = (ScoredPairs(), Triplets(), AnchorPairs())
