"""Formats of rows that tasks other than language modeling train on."""

import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import ClassVar, NamedTuple

from ..config.choices import LOSSES
from ..config.data import DataConfig
from .chat_formats import CONVERSATION_COLUMNS, Chat, Completion
from .images import plain_text
from .row_format import (
    Row,
    RowError,
    RowFormat,
    as_number,
    as_truth,
    check_unicode,
    messages_of,
    number_of,
    optional,
    plain,
    shown,
    text_of,
    texts_of,
    unpacked,
)

# Other names of the columns of embedders and rerankers: those of sentence-transformers, and of
# FlagEmbedding.
POSITIVE_NAMES = ("positives", "pos")
NEGATIVE_NAMES = ("negative", "negatives", "neg", "negative_1")
RELEVANCE_NAMES = ("labels", "label", "scores", "score", "relevance")
_NUMBERED = re.compile(r"negative_\d+")
LABEL_COLUMNS = ("label", "labels", "score")  # a row has one of them
_MOST_SCORE = 3e38  # of float32
MOST_NEGATIVES = 32  # of an anchor
_MOST_LABEL = 1e6
_NAMES = DataConfig()  # rankings have names of their own
_QUERY_NAMES = ("anchor",)


class Preference(RowFormat):
    """A prompt with a completion that is chosen and one that is rejected, as TRL has them.

    Without a prompt both are conversations that begin with the same messages.
    """

    name = "preferences"

    def columns(self, names: DataConfig) -> tuple[str, ...]:
        """The prompt may be part of both, so its own column is optional."""
        return ("chosen", "rejected")

    def optional_columns(self, names: DataConfig) -> tuple[str, ...]:
        return (names.prompt_feature, *CONVERSATION_COLUMNS)

    def texts(self, row: Row, names: DataConfig) -> list[str]:
        return [
            text
            for column in (names.prompt_feature, *self.columns(names))
            for text in _texts(row, column)
        ]


class RatedCompletion(Completion):
    """A prompt, a completion, and whether that is desirable."""

    name = "rated completions"

    def columns(self, names: DataConfig) -> tuple[str, ...]:
        return (*super().columns(names), "label")

    def resembles(self, row: Row, names: DataConfig) -> bool:
        return self.matches(row, names) and as_truth(row.value["label"]) is not None


class Prompt(RowFormat):
    """A prompt whose completions are generated; a reward function sees all columns of its row."""

    name = "prompts"

    def columns(self, names: DataConfig) -> tuple[str, ...]:
        return (names.prompt_feature,)

    def texts(self, row: Row, names: DataConfig) -> list[str]:
        return _texts(row, names.prompt_feature)

    def used(self, row: Row, names: DataConfig) -> set[str]:
        return set(row.value)


def _texts(row: Row, column: str) -> list[str]:
    """A column has a text, or messages with one each; without the column there is none."""
    if not isinstance(value := messages_of(row.value.get(column, [])), list):
        return [text_of(row, column)]

    contents = [plain_text(m.get("content")) for m in value if isinstance(m, Mapping)]
    return [content for content in contents if content]


class LabelledText(RowFormat):
    """A text with its label, its labels, or a score."""

    name = "labelled texts"

    def columns(self, names: DataConfig) -> tuple[str, ...]:
        return (names.text_feature,)

    def optional_columns(self, names: DataConfig) -> tuple[str, ...]:
        return LABEL_COLUMNS

    def texts(self, row: Row, names: DataConfig) -> list[str]:
        return [text_of(row, names.text_feature)]

    def matches(self, row: Row, names: DataConfig) -> bool:
        return super().matches(row, names) and _is_labelled(row)


class LabelledChat(Chat):
    """A chat with its label, its labels, or a score."""

    name = "labelled chats"

    def optional_columns(self, names: DataConfig) -> tuple[str, ...]:
        return (*LABEL_COLUMNS, *super().optional_columns(names))

    def matches(self, row: Row, names: DataConfig) -> bool:
        return super().matches(row, names) and _is_labelled(row)


def _is_labelled(row: Row) -> bool:
    return any(optional(row, column) is not None for column in LABEL_COLUMNS)


def negative_columns(row: Row, column: str) -> list[str]:
    """Return the columns with the negatives of a row: one, or all that are numbered."""
    if not _NUMBERED.fullmatch(column):
        return [column]

    numbered = [each for each in row.value if _NUMBERED.fullmatch(str(each))]
    return [each for each in numbered if optional(row, each) is not None] or [column]


def negatives_of(row: Row, column: str, most: int | None = None) -> list[str]:
    """Return the texts of `negative_columns`; more than ``most`` are an error."""
    texts = [text for each in negative_columns(row, column) for text in texts_of(row, each)]
    if most is not None and len(texts) > most:
        fault = f"has {len(texts)} negatives, but at most {most} are read. Leave others out."
        raise row.error(fault, "wrong type")

    return texts


PREFERENCE = Preference()
PROMPT = Prompt()
RATED = RatedCompletion()
PREFERENCE_FORMATS: tuple[RowFormat, ...] = (PREFERENCE,)
RATED_FORMATS: tuple[RowFormat, ...] = (RATED,)
PROMPT_FORMATS: tuple[RowFormat, ...] = (PROMPT,)
LABEL_FORMATS: tuple[RowFormat, ...] = (LabelledChat(), LabelledText())


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
