"""Formats of preferences, rated completions, prompts, and of labelled texts and chats."""

import re
from collections.abc import Mapping

from ..config.data import DataConfig
from .cells import as_truth, messages_of, texts_of
from .chat_formats import CONVERSATION_COLUMNS, Chat, Completion
from .images import plain_text
from .row_format import Row, RowFormat, optional, text_of

# Other names of the columns of embedders and rerankers: those of sentence-transformers, and of
# FlagEmbedding.
POSITIVE_NAMES = ("positives", "pos")
NEGATIVE_NAMES = ("negative", "negatives", "neg", "negative_1")
RELEVANCE_NAMES = ("labels", "label", "scores", "score", "relevance")
_NUMBERED = re.compile(r"negative_\d+")
LABEL_COLUMNS = ("label", "labels", "score")  # a row has one of them


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
