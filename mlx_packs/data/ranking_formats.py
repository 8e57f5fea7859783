"""Formats of rows that rerankers are trained on."""

from abc import abstractmethod
from typing import NamedTuple

from ..config.data import DataConfig
from .cells import as_number, as_truth, list_of, unpacked
from .row_format import Row, RowFormat, check_unicode, plain, shown, text_of

_MOST_LABEL = 1e6


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

    def columns(self, names: DataConfig) -> tuple[str, ...]:
        return ("query", "positive", "negatives")

    def _ranking(self, row: Row) -> Ranking:
        positives = _list_of_texts(row, "positive")
        negatives = _list_of_texts(row, "negatives")
        labels = [1.0] * len(positives) + [0.0] * len(negatives)
        return Ranking(text_of(row, "query"), positives + negatives, labels)


class LabelledDocuments(RankingFormat):
    """A query, documents, and a label of each: the higher, the better it answers."""

    name = "labelled documents"

    def columns(self, names: DataConfig) -> tuple[str, ...]:
        return ("query", "documents", "labels")

    def _ranking(self, row: Row) -> Ranking:
        documents = _list_of_texts(row, "documents")
        values = list_of(row, "labels", "numbers")
        labels = [number for value in values if (number := relevance(value)) is not None]
        if len(labels) != len(values):
            fault = f"'labels' must be numbers of 0 or more, but is {shown(values)}."
            raise row.error(fault, "wrong type")

        if len(labels) != len(documents):
            fault = f"has {len(documents)} documents, but {len(labels)} labels."
            raise row.error(fault, "wrong type")
        return Ranking(text_of(row, "query"), documents, labels)


def relevance(value: object) -> float | None:
    """Return how well a document answers a query; None if a value does not say that."""
    number = as_number(value)
    if number is None:
        truth = as_truth(value)
        return None if truth is None else float(truth)

    if 0 <= number <= _MOST_LABEL:
        return number
    return None


def _list_of_texts(row: Row, column: str) -> list[str]:
    """A text is a list of one, unless the column has the name of several."""
    values = plain(unpacked(row.value[column]))
    if isinstance(values, str) and column not in ("documents", "negatives"):
        values = [values]
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        fault = f"'{column}' must be a list of texts, but is {shown(values)}."
        raise row.error(fault, "wrong type")

    if not values:
        raise row.error(f"'{column}' is empty: a query needs documents.", "empty")
    return values


RANKING_FORMATS: tuple[RankingFormat, ...] = (PositiveAndNegatives(), LabelledDocuments())
