"""Formats of rows that tasks other than language modeling train on."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from ..config.choices import LOSSES
from ..config.data import DataConfig
from .chat_formats import CONVERSATION_COLUMNS, Chat, Completion
from .row_format import (
    Row,
    RowError,
    RowFormat,
    as_number,
    as_truth,
    check_unicode,
    number_of,
    optional,
    plain,
    text_of,
    texts_of,
    unpacked,
    wrong_type,
)

# Other names of the columns of embedders and rerankers: those of sentence-transformers, and of
# FlagEmbedding.
POSITIVE_NAMES = ("positives", "pos")
NEGATIVE_NAMES = ("negative", "negatives", "neg", "negative_1")
RELEVANCE_NAMES = ("labels", "label", "scores", "score", "relevance")
_DOCUMENT_NAMES = ("document", "documents", "passage")
_NUMBERED = re.compile(r"negative_\d+")
LABEL_COLUMNS = ("label", "labels", "score")  # a row has one of them
MOST_NEGATIVES = 32  # of an anchor
_MOST_LABEL = 1e6
_NAMES = DataConfig()  # rankings have names of their own


class Preference(RowFormat):
    """A prompt with a completion that is chosen and one that is rejected, as TRL has them.

    Without a prompt both are conversations that begin with the same messages.
    """

    name = "preferences"

    def columns(self, names: DataConfig) -> tuple[str, ...]:
        """The prompt may be part of both, so its own column is optional."""
        return ("chosen", "rejected")

    def optional_columns(self, names: DataConfig) -> tuple[str, ...]:
        return CONVERSATION_COLUMNS

    def text_columns(self, row: Row, names: DataConfig) -> list[str]:
        return [names.prompt_feature, *self.columns(names)]


class RatedCompletion(Completion):
    """A prompt, a completion, and whether that is desirable."""

    name = "rated completions"

    def columns(self, names: DataConfig) -> tuple[str, ...]:
        return (*super().columns(names), "label")


class Prompt(RowFormat):
    """A prompt whose completions are generated; a reward function sees all columns of its row."""

    name = "prompts"

    def columns(self, names: DataConfig) -> tuple[str, ...]:
        return (names.prompt_feature,)

    def used(self, row: Row, names: DataConfig) -> set[str]:
        return set(row.value)


class LabelledText(RowFormat):
    """A text with its label, its labels, or a score."""

    name = "labelled texts"

    def columns(self, names: DataConfig) -> tuple[str, ...]:
        return (names.text_feature,)

    def optional_columns(self, names: DataConfig) -> tuple[str, ...]:
        return LABEL_COLUMNS

    def matches(self, row: Row, names: DataConfig) -> bool:
        return super().matches(row, names) and _is_labelled(row)


class LabelledChat(Chat):
    """A chat with its label, its labels, or a score."""

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
LABEL_FORMATS: tuple[RowFormat, ...] = (LabelledChat("labelled chats"), LabelledText())


@dataclass(frozen=True, eq=False)
class PairFormat(RowFormat):
    """Rows of sentence-transformers, which an encoder trains on.

    Attributes:
        sides: the columns of texts: anchor, positive and negative, or two sentences.
        score_column: the column of a score; None if rows have no score.
        other_names: names that a column may have instead.
    """

    name: str
    sides: tuple[str, ...]
    score_column: str | None = None
    other_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def has_anchors(self) -> bool:
        """Whether the first text of a row is a query, which the others answer."""
        return "anchor" in self.sides

    @property
    def has_negatives(self) -> bool:
        """Whether every row has negatives of its own."""
        return "negative" in self.sides

    @property
    def losses(self) -> list[str]:
        """The losses that the columns suffice for; the first is what ``auto`` takes."""
        return [
            name
            for name, facts in LOSSES.items()
            if facts.scored == bool(self.score_column) and facts.texts <= len(self.sides)
        ]

    def columns(self, names: DataConfig) -> tuple[str, ...]:
        if not self.score_column:
            return self.sides
        return (*self.sides, self.score_column)

    def text_columns(self, row: Row, names: DataConfig) -> list[str]:
        columns = super().text_columns(row, names)
        if self.has_negatives:
            columns[2:] = negative_columns(row, columns[2])
        return columns

    def matches(self, row: Row, names: DataConfig) -> bool:
        """Documents with labels do not all belong to the query."""
        is_document = self.column(row, "positive") in _DOCUMENT_NAMES
        is_judged = any(column in row.value for column in RELEVANCE_NAMES)
        return super().matches(row, names) and not (is_document and is_judged)

    def usable(self, row: Row) -> Iterator[tuple[list[str], float | None]]:
        """Yield the texts of each pair of a row and its score; a RowError says what is wrong."""
        columns = [self._texts(row, column) for column in self.sides]
        for name, texts in zip(self.sides, columns, strict=True):
            for text in texts:
                check_unicode(row, text)
                if not text.strip():
                    raise row.error(f"'{self.column(row, name)}' is empty.", "empty")

        score = None
        if self.score_column is not None:
            score = number_of(row, self.column(row, self.score_column))
        (first,), seconds, *negatives = columns
        for second in seconds:
            yield [first, second, *chain.from_iterable(negatives)], score

    def _texts(self, row: Row, name: str) -> list[str]:
        """Return one text, of answers to an anchor one or several."""
        column = self.column(row, name)
        if name == "positive":
            return texts_of(row, column)
        if name == "negative":
            return negatives_of(row, column, MOST_NEGATIVES)
        return [text_of(row, column)]


PAIR_FORMATS: tuple[PairFormat, ...] = (
    PairFormat("scored pairs", ("sentence1", "sentence2"), "score", {"score": ("label",)}),
    PairFormat(
        "triplets",
        ("anchor", "positive", "negative"),
        other_names={
            "anchor": ("query",),
            "positive": POSITIVE_NAMES,
            "negative": NEGATIVE_NAMES,
        },
    ),
    PairFormat(
        "pairs",
        ("anchor", "positive"),
        other_names={"anchor": ("query",), "positive": (*POSITIVE_NAMES, *_DOCUMENT_NAMES)},
    ),
)


class Ranking(NamedTuple):
    """A query, its documents, and how well each answers it: 0 or more."""

    query: str
    documents: list[str]
    labels: list[float]


@dataclass(frozen=True, eq=False)
class RankingFormat(RowFormat):
    """A query with documents that answer it and others that do not, or with labelled documents.

    The higher the label of a document, the better it answers. A row may have one document with its
    label; `grouped` joins those of a query.
    """

    name: str
    parts: tuple[str, ...]
    other_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def columns(self, names: DataConfig) -> tuple[str, ...]:
        return self.parts

    @property
    def is_labelled(self) -> bool:
        return "labels" in self.parts

    def text_columns(self, row: Row, names: DataConfig) -> list[str]:
        query, documents, others = super().text_columns(row, names)
        if self.is_labelled:
            return [query, documents, others]
        return [query, documents, *negative_columns(row, others)]

    def usable(self, row: Row) -> Ranking:
        """Return the ranking of a row, or raise the RowError that says what is wrong."""
        query, documents, others = (self.column(row, part) for part in self.parts)
        if self.is_labelled:
            ranking = Ranking(text_of(row, query), *_labelled(row, documents, others))
        else:
            positives = texts_of(row, documents)
            negatives = negatives_of(row, others)
            labels = [1.0] * len(positives) + [0.0] * len(negatives)
            ranking = Ranking(text_of(row, query), positives + negatives, labels)

        for text in (ranking.query, *ranking.documents):
            check_unicode(row, text)
            if not text.strip():
                raise row.error("a query or document is empty.", "empty")

        if len(set(ranking.labels)) < 2:
            fault = "all labels are equal, but a ranking needs documents of different ones."
            raise row.error(fault, "no target")
        return ranking

    def grouped(self, rows: Sequence[Row]) -> Sequence[Row]:
        if not self.is_labelled:
            return rows

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


def _labelled(row: Row, documents: str, labels: str) -> tuple[list[str], list[float]]:
    """Return the documents of a row and the label of each, by the names of their columns."""
    values = plain(unpacked(row.value[labels]))
    if not isinstance(values, list):
        values = [values]

    relevances = [number for value in values if (number := relevance(value)) is not None]
    if len(relevances) != len(values):
        raise wrong_type(row, labels, "numbers of 0 or more")

    texts = texts_of(row, documents)
    if len(relevances) != len(texts):
        fault = f"has {len(texts)} documents, but {len(relevances)} labels."
        raise row.error(fault, "wrong type")
    return texts, relevances


def relevance(value: object) -> float | None:
    """Return how well a document answers a query; None if a value does not say that."""
    number = as_number(value)
    if number is None:
        truth = as_truth(value)
        return None if truth is None else float(truth)

    if 0 <= number <= _MOST_LABEL:
        return number
    return None


RANKING_FORMATS: tuple[RankingFormat, ...] = (
    RankingFormat(
        "queries with negatives",
        ("query", "positive", "negatives"),
        {"query": ("anchor",), "positive": POSITIVE_NAMES, "negatives": NEGATIVE_NAMES},
    ),
    RankingFormat(
        "labelled documents",
        ("query", "documents", "labels"),
        {
            "query": ("anchor",),
            "documents": ("document", "docs", "passage", "passages"),
            "labels": RELEVANCE_NAMES,
        },
    ),
)
