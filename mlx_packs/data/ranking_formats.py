"""Formats of rows that rerankers are trained on."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import ClassVar, NamedTuple

from ..config.data import DataConfig
from .bad_rows import RowError
from .cells import as_number, as_truth, texts_of, unpacked
from .row_format import Row, RowFormat, check_unicode, plain, shown, text_of
from .task_formats import (
    NEGATIVE_NAMES,
    POSITIVE_NAMES,
    RELEVANCE_NAMES,
    negative_columns,
    negatives_of,
)

_MOST_LABEL = 1e6
_NAMES = DataConfig()  # rankings have names of their own
_QUERY_NAMES = ("anchor",)


class Ranking(NamedTuple):
    """A query, its documents, and how well each answers it: 0 or more."""

    query: str
    documents: list[str]
    labels: list[float]


class RankingFormat(RowFormat):
    """A kind of row with a query and its documents."""

    def texts(self, row: Row, names: DataConfig) -> list[str]:
        ranking = self._ranking(row)
        return [ranking.query, *ranking.documents]

    def usable(self, row: Row) -> Ranking:
        """Return the ranking of a row, or raise the RowError that says what is wrong."""
        ranking = self._ranking(row)
        for text in (ranking.query, *ranking.documents):
            check_unicode(row, text)
            if not text.strip():
                raise row.error("a query or document is empty.", "empty")

        if len(set(ranking.labels)) < 2:
            fault = "all labels are equal, but a ranking needs documents of different ones."
            raise row.error(fault, "no target")
        return ranking

    @abstractmethod
    def _ranking(self, row: Row) -> Ranking: ...


class PositiveAndNegatives(RankingFormat):
    """A query, one document or several that answer it, and others that do not."""

    name = "queries with negatives"
    other_names: ClassVar = {
        "query": _QUERY_NAMES,
        "positive": POSITIVE_NAMES,
        "negatives": NEGATIVE_NAMES,
    }

    def columns(self, names: DataConfig) -> tuple[str, ...]:
        return ("query", "positive", "negatives")

    def used(self, row: Row, names: DataConfig) -> set[str]:
        return super().used(row, names) | set(negative_columns(row, self.column(row, "negatives")))

    def _ranking(self, row: Row) -> Ranking:
        positives = texts_of(row, self.column(row, "positive"))
        negatives = negatives_of(row, self.column(row, "negatives"))
        labels = [1.0] * len(positives) + [0.0] * len(negatives)
        return Ranking(text_of(row, self.column(row, "query")), positives + negatives, labels)


class LabelledDocuments(RankingFormat):
    """A query, documents, and a label of each: the higher, the better it answers.

    A row may have one document with its label; `grouped` joins those of a query.
    """

    name = "labelled documents"
    other_names: ClassVar = {
        "query": _QUERY_NAMES,
        "documents": ("document", "docs", "passage", "passages"),
        "labels": RELEVANCE_NAMES,
    }

    def columns(self, names: DataConfig) -> tuple[str, ...]:
        return ("query", "documents", "labels")

    def grouped(self, rows: Sequence[Row]) -> Sequence[Row]:
        groups: dict[str, Row] = {}
        joined: list[Row] = []

        for row in rows:
            query = self._query_of_one(row)
            if query is None:
                joined.append(row)
                continue

            if query not in groups:
                groups[query] = self._group_of(row)
                joined.append(groups[query])

            group = groups[query].value
            group["documents"].append(row.value[self.column(row, "documents")])
            group["labels"].append(row.value[self.column(row, "labels")])

        return joined if groups else rows

    def _query_of_one(self, row: Row) -> str | None:
        """Return the query of a row that has a single document with a label, else None."""
        with suppress(RowError):  # encoding names such rows
            if isinstance(row.value, Mapping) and self.matches(row, _NAMES):
                label = row.value[self.column(row, "labels")]
                texts = [row.value[self.column(row, name)] for name in ("query", "documents")]
                if relevance(label) is not None and all(isinstance(t, str) for t in texts):
                    return texts[0]

        return None

    def _group_of(self, row: Row) -> Row:
        """Return a row without documents; its other columns are those of the first row."""
        columns = {self.column(row, name): name for name in self.columns(_NAMES)}
        others = {name: value for name, value in row.value.items() if name not in columns}
        query = row.value[self.column(row, "query")]
        return row.with_value({**others, "query": query, "documents": [], "labels": []})

    def _ranking(self, row: Row) -> Ranking:
        column = self.column(row, "labels")
        values = plain(unpacked(row.value[column]))
        if not isinstance(values, list):
            values = [values]

        labels = [number for value in values if (number := relevance(value)) is not None]
        if len(labels) != len(values):
            fault = f"'{column}' must be numbers of 0 or more, but is {shown(row.value[column])}."
            raise row.error(fault, "wrong type")

        documents = texts_of(row, self.column(row, "documents"))
        if len(labels) != len(documents):
            fault = f"has {len(documents)} documents, but {len(labels)} labels."
            raise row.error(fault, "wrong type")

        return Ranking(text_of(row, self.column(row, "query")), documents, labels)


def relevance(value: object) -> float | None:
    """Return how well a document answers a query; None if a value does not say that."""
    number = as_number(value)
    if number is None:
        truth = as_truth(value)
        return None if truth is None else float(truth)

    if 0 <= number <= _MOST_LABEL:
        return number
    return None


RANKING_FORMATS: tuple[RankingFormat, ...] = (PositiveAndNegatives(), LabelledDocuments())
