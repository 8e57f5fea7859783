"""Formats of rows that rerankers are trained on."""

from abc import abstractmethod
from typing import NamedTuple

from ..config.data import DataConfig
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
        positives = row.value["positive"]
        if isinstance(positives, str):
            positives = [positives]

        positives = _list_of_texts(row, "positive", positives)
        negatives = _list_of_texts(row, "negatives", row.value["negatives"])
        labels = [1.0] * len(positives) + [0.0] * len(negatives)
        return Ranking(text_of(row, "query"), positives + negatives, labels)


class LabelledDocuments(RankingFormat):
    """A query, documents, and a label of each: the higher, the better it answers."""

    name = "labelled documents"

    def columns(self, names: DataConfig) -> tuple[str, ...]:
        return ("query", "documents", "labels")

    def _ranking(self, row: Row) -> Ranking:
        documents = _list_of_texts(row, "documents", row.value["documents"])
        labels = plain(row.value["labels"])
        if not isinstance(labels, list) or not all(
            type(label) in (int, float) and 0 <= label <= _MOST_LABEL for label in labels
        ):
            fault = f"'labels' must be numbers of 0 or more, but is {shown(labels)}."
            raise row.error(fault, "wrong type")

        if len(labels) != len(documents):
            fault = f"has {len(documents)} documents, but {len(labels)} labels."
            raise row.error(fault, "wrong type")
        return Ranking(text_of(row, "query"), documents, [float(label) for label in labels])


def _list_of_texts(row: Row, column: str, values: object) -> list[str]:
    values = plain(values)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        fault = f"'{column}' must be a list of texts, but is {shown(values)}."
        raise row.error(fault, "wrong type")

    if not values:
        raise row.error(f"'{column}' is empty: a query needs documents.", "empty")
    return values


RANKING_FORMATS: tuple[RankingFormat, ...] = (PositiveAndNegatives(), LabelledDocuments())
