"""Formats of rows that tasks other than language modeling train on."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from ..config.choices import LOSSES
from ..config.data import DataConfig
from .chat_formats import CONVERSATION_COLUMNS, Chat, Completion
from .row_format import (
    Row,
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

# Other names of the columns of embedders and rerankers, in sentence-transformers and
# FlagEmbedding.
POSITIVE_NAMES = ("positives", "pos")
NEGATIVE_NAMES = ("negative", "negatives", "neg", "negative_1")
RELEVANCE_NAMES = ("labels", "label", "scores", "score", "relevance")
_DOCUMENT_NAMES = ("document", "documents", "passage")
_SINGLE = ("anchor", "query", "sentence1", "sentence2")  # columns of one text
_NUMBERED = re.compile(r"negative_\d+")
LABEL_COLUMNS = ("label", "labels", "score")  # a row has one of them
MOST_NEGATIVES = 32  # of an anchor
_MOST_LABEL = 1e6


@dataclass(frozen=True, eq=False)
class Prompt(RowFormat):
    """A prompt whose completions are generated; a reward function sees all columns of its row."""

    def used(self, row: Row, names: DataConfig) -> set[str]:
        return set(row.value)


# A prompt with a completion that is chosen and one that is rejected, as TRL has them. Without a
# prompt both are conversations that begin with the same messages.
PREFERENCE = RowFormat(
    "preferences",
    ("chosen", "rejected"),
    CONVERSATION_COLUMNS,
    with_texts=("prompt_feature", "chosen", "rejected"),
)
PROMPT = Prompt("prompts", ("prompt_feature",))
# A prompt, a completion, and whether that is desirable.
RATED = Completion("rated completions", (*Completion.required, "label"))
# A text or a chat with its label, its labels, or a score.
LABELLED_TEXT = RowFormat("labelled texts", ("text_feature",), LABEL_COLUMNS, LABEL_COLUMNS)
LABELLED_CHAT = Chat(
    "labelled chats", optional=(*LABEL_COLUMNS, *CONVERSATION_COLUMNS), one_of=LABEL_COLUMNS
)
PREFERENCE_FORMATS: tuple[RowFormat, ...] = (PREFERENCE,)
RATED_FORMATS: tuple[RowFormat, ...] = (RATED,)
PROMPT_FORMATS: tuple[RowFormat, ...] = (PROMPT,)
LABEL_FORMATS: tuple[RowFormat, ...] = (LABELLED_CHAT, LABELLED_TEXT)


@dataclass(frozen=True, eq=False)
class TextsFormat(RowFormat):
    """Rows of texts that are read as a whole: one in a column of `_SINGLE`, in others several."""

    def text_columns(self, row: Row, names: DataConfig) -> list[str]:
        columns = super().text_columns(row, names)
        return [each for column in columns for each in _numbered(row, column)]

    def texts_in(self, row: Row, name: str) -> list[str]:
        """Return the texts of a column and of those numbered like it; none may be empty."""
        column = self.column(row, name)
        if name in _SINGLE:
            texts = [text_of(row, column)]
        else:
            texts = [text for each in _numbered(row, column) for text in texts_of(row, each)]

        for text in texts:
            check_unicode(row, text)
            if not text.strip():
                raise row.error(f"'{column}' is empty.", "empty")
        return texts


def _numbered(row: Row, column: str) -> list[str]:
    """Return the columns with the negatives of a row if they are numbered, else the column."""
    if not _NUMBERED.fullmatch(column):
        return [column]

    numbered = [each for each in row.value if _NUMBERED.fullmatch(str(each))]
    return [each for each in numbered if optional(row, each) is not None] or [column]


@dataclass(frozen=True, eq=False)
class PairFormat(TextsFormat):
    """Rows of sentence-transformers, which an encoder trains on.

    Columns are texts (anchor, positive and negative, or two sentences), and maybe a score.
    """

    @property
    def sides(self) -> tuple[str, ...]:
        """The columns of texts."""
        return tuple(column for column in self.required if column != "score")

    @property
    def has_scores(self) -> bool:
        return "score" in self.required

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
            if facts.scored == self.has_scores and facts.texts <= len(self.sides)
        ]

    def matches(self, row: Row, names: DataConfig) -> bool:
        """Documents with labels do not all belong to the query."""
        is_document = self.column(row, "positive") in _DOCUMENT_NAMES
        is_judged = any(column in row.value for column in RELEVANCE_NAMES)
        return super().matches(row, names) and not (is_document and is_judged)

    def usable(self, row: Row) -> Iterator[tuple[list[str], float | None]]:
        """Yield the texts of each pair of a row and its score; a RowError says what is wrong."""
        (first,), seconds, *others = (self.texts_in(row, column) for column in self.sides)
        negatives = [*chain.from_iterable(others)]
        if len(negatives) > MOST_NEGATIVES:
            raise row.error(
                f"has {len(negatives)} negatives, but at most {MOST_NEGATIVES} are read. Leave "
                "others out.",
                "wrong type",
            )

        score = None
        if self.has_scores:
            score = number_of(row, self.column(row, "score"))
        for second in seconds:
            yield [first, second, *negatives], score


PAIR_FORMATS: tuple[PairFormat, ...] = (
    PairFormat(
        "scored pairs", ("sentence1", "sentence2", "score"), other_names={"score": ("label",)}
    ),
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


@dataclass(frozen=True, eq=False)
class RankingFormat(TextsFormat):
    """A query with documents that answer it and others that do not, or with labelled documents.

    The higher the label of a document, the better it answers.
    """

    @property
    def is_labelled(self) -> bool:
        return "labels" in self.required

    def usable(self, row: Row) -> tuple[str, list[str], list[float]]:
        """Return query, documents and labels of a row; a RowError says what is wrong."""
        (query,) = self.texts_in(row, "query")
        texts = self.texts_in(row, self.required[1])
        if self.is_labelled:
            labels = _labels(row, len(texts), self.column(row, "labels"))
        else:
            negatives = self.texts_in(row, "negatives")
            labels = [1.0] * len(texts) + [0.0] * len(negatives)
            texts += negatives

        if len(set(labels)) < 2:
            raise row.error(
                "all labels are equal, but a ranking needs documents of different ones. Write all "
                "documents of a query into one row: {query, documents, labels}.",
                "no target",
            )
        return query, texts, labels


def _labels(row: Row, count: int, column: str) -> list[float]:
    """Return the labels of ``count`` documents."""
    values = plain(unpacked(row.value[column]))
    if not isinstance(values, list):
        values = [values]

    relevances = [number for value in values if (number := relevance(value)) is not None]
    if len(relevances) != len(values):
        raise wrong_type(row, column, "numbers of 0 or more")

    if len(relevances) != count:
        raise row.error(f"has {count} documents, but {len(relevances)} labels.", "wrong type")
    return relevances


def relevance(value: object) -> float | None:
    """Return how well a document answers a query; None if a value does not say that."""
    number = as_number(value)
    if number is None and (truth := as_truth(value)) is not None:
        number = float(truth)
    if number is not None and 0 <= number <= _MOST_LABEL:
        return number
    return None


RANKING_FORMATS: tuple[RankingFormat, ...] = (
    RankingFormat(
        "queries with negatives",
        ("query", "positive", "negatives"),
        other_names={
            "query": ("anchor",),
            "positive": POSITIVE_NAMES,
            "negatives": NEGATIVE_NAMES,
        },
    ),
    RankingFormat(
        "labelled documents",
        ("query", "documents", "labels"),
        other_names={
            "query": ("anchor",),
            "documents": ("document", "docs", "passage", "passages"),
            "labels": RELEVANCE_NAMES,
        },
    ),
)
