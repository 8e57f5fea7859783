"""Row formats: which columns each has, and what becomes of a row.

To add a format, write its class and name it in `FORMATS`.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..bases.tokenizer import tokenizer_errors
from ..config.choices import LOSSES
from ..config.schema import DataConfig
from ..errors import Code, PackError
from .bad_rows import Reason, RowError
from .conversations import Conversation, Span

_MOST_SCORE = 3e38  # of float32
_PROMPT_TOKENS = 32  # that are to be continued; of a short text at most half


@dataclass(frozen=True)
class Row:
    """One row as it was read, with the place that messages name (``train.jsonl:17``)."""

    where: str
    value: Mapping

    def error(
        self, fault: str, reason: Reason, flag: str | None = None, code: Code = "data"
    ) -> RowError:
        """Return the error of a row that cannot be used, which ``--on-bad-row`` may leave out."""
        return RowError(self.where, fault, reason, code, flag)

    def conflict(self, fault: str, code: Code, flag: str | None = None) -> PackError:
        """Return an error that this row shows, but that is not its own: a setting or the base."""
        return PackError(f"{self.where}: {fault}", code, flag)

    def text(self) -> str:
        """Return the row as it stands in its file, or as JSON."""
        return json.dumps(self.value, ensure_ascii=False, default=str)


class RowFormat(ABC):
    """A kind of row, recognized by its columns; ``name`` is what reports and manifests call it."""

    name: ClassVar[str]

    @abstractmethod
    def columns(self, names: DataConfig) -> tuple[str, ...]:
        """Return the columns that a row of this format has."""

    @abstractmethod
    def texts(self, row: Row, names: DataConfig) -> list[str]:
        """Return every text of a row, for what needs texts of whatever kind."""

    def matches(self, row: Row, names: DataConfig) -> bool:
        """Return whether a row has the columns of this format."""
        return all(column in row.value for column in self.columns(names))


class TokenFormat(RowFormat):
    """Rows that a causal model trains on."""

    loss_on: ClassVar[str]  # what is supervised by default
    special_tokens: ClassVar[bool] = False  # whether the tokenizer adds what begins and ends a text

    @abstractmethod
    def render(
        self, row: Row, names: DataConfig, loss_on: str, tokenizer: Any
    ) -> tuple[str, list[Span]]:
        """Return the text of a row and the spans of it that are targets (none for ``all``)."""

    @abstractmethod
    def prompt(self, row: Row, names: DataConfig, tokenizer: Any) -> tuple[str, list[int]]:
        """Return what of a row a model is asked to complete: as people see it, and its tokens."""

    def resolve_loss_on(self, loss_on: str | None) -> str:
        """Return what is supervised, where None is the default."""
        return loss_on or self.loss_on


class Chat(TokenFormat):
    """Messages with roles, and the tools that they may call."""

    name = "chat"
    loss_on = "assistant"

    def columns(self, names: DataConfig) -> tuple[str, ...]:
        """Return the column with the messages."""
        return (names.chat_feature,)

    def messages(self, row: Row, names: DataConfig) -> list[Mapping]:
        """Return the messages of a row, as the chat template takes them."""
        column = names.chat_feature
        messages = row.value[column]

        def fault(rule: str, value: Any) -> PackError:
            shown = json.dumps(value, ensure_ascii=False, default=str)
            shown = shown if len(shown) < 60 else shown[:60] + "…"
            return row.error(f"{rule} Shown: {shown}", "wrong type")

        if messages == []:
            raise fault(f"'{column}' must hold at least one message.", messages)
        if not isinstance(messages, list):
            rule = f"'{column}' must be a list of {{role, content}}, but is a"
            raise fault(f"{rule} {type(messages).__name__}.", messages)
        for message in messages:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise fault("every message must be an object with a 'role'.", message)
            content = message.get("content")
            if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
                raise fault("the 'content' of a message must be a text.", message)
        return messages

    def conversation(self, row: Row, names: DataConfig, tokenizer: Any) -> Conversation:
        """Return the messages of a row with their tools, which may be a JSON text."""
        messages, tools = self.messages(row, names), row.value.get("tools")
        if not tokenizer.has_chat_template:
            raise row.conflict(
                "the base's tokenizer has no chat template. Use examples with 'text', or a base "
                "that has one.",
                "unsupported",
            )
        if isinstance(tools, str):
            try:
                tools = json.loads(tools)
            except (ValueError, RecursionError) as error:
                raise row.error(f"'tools' is not valid JSON: {error}.", "wrong type") from None
        return Conversation(row.where, messages, tools, tokenizer)

    def render(
        self, row: Row, names: DataConfig, loss_on: str, tokenizer: Any
    ) -> tuple[str, list[Span]]:
        """Return the rendered conversation and the spans of its answers."""
        return self.conversation(row, names, tokenizer).supervised(loss_on)

    def prompt(self, row: Row, names: DataConfig, tokenizer: Any) -> tuple[str, list[int]]:
        """Return the messages before the first answer."""
        conversation = self.conversation(row, names, tokenizer)
        roles = [message["role"] for message in conversation.messages]
        first = roles.index("assistant") if "assistant" in roles else 0
        messages = list(conversation.messages)[: max(1, first)]
        return messages[-1].get("content") or "", conversation.prompt_tokens(messages)

    def texts(self, row: Row, names: DataConfig) -> list[str]:
        """Return the content of each message."""
        return [text for m in self.messages(row, names) if (text := m.get("content"))]


class Completion(Chat):
    """A prompt and its completion: a conversation of two messages."""

    name = "completion"
    loss_on = "completion"

    def columns(self, names: DataConfig) -> tuple[str, ...]:
        """Return the columns with the prompt and the completion."""
        return (names.prompt_feature, names.completion_feature)

    def messages(self, row: Row, names: DataConfig) -> list[Mapping]:
        """Return the prompt as the user's message, the completion as the assistant's."""
        roles = zip(("user", "assistant"), self.columns(names), strict=True)
        return [{"role": role, "content": _text_of(row, column)} for role, column in roles]


class Text(TokenFormat):
    """A plain text, all of which is supervised."""

    name = "text"
    loss_on = "all"
    special_tokens = True

    def columns(self, names: DataConfig) -> tuple[str, ...]:
        """Return the column with the text."""
        return (names.text_feature,)

    def render(
        self, row: Row, names: DataConfig, loss_on: str, tokenizer: Any
    ) -> tuple[str, list[Span]]:
        """Return the text as it is."""
        text = _text_of(row, names.text_feature)
        if not text:
            raise row.error(f"'{names.text_feature}' is empty.", "empty")
        return text, []

    def prompt(self, row: Row, names: DataConfig, tokenizer: Any) -> tuple[str, list[int]]:
        """Return the beginning of the text."""
        with tokenizer_errors(tokenizer):
            tokens = tokenizer.encode(row.value[names.text_feature])
        tokens = tokens[: max(1, min(_PROMPT_TOKENS, len(tokens) // 2))]
        return tokenizer.decode(tokens), tokens

    def texts(self, row: Row, names: DataConfig) -> list[str]:
        """Return the text."""
        return [_text_of(row, names.text_feature)]

    def resolve_loss_on(self, loss_on: str | None) -> str:
        """``all``; a text has no prompt that could be left out."""
        if loss_on not in (None, "all"):
            raise PackError(
                f"--loss-on {loss_on}: text examples have no prompt. Use --loss-on all.", "conflict"
            )
        return "all"


class PairFormat(RowFormat):
    """Rows of sentence-transformers, which an encoder trains on."""

    text_columns: ClassVar[tuple[str, ...]]
    score_column: ClassVar[str | None] = None  # None where rows have no score

    @property
    def has_negatives(self) -> bool:
        """Whether every row has a negative of its own."""
        return "negative" in self.text_columns

    @property
    def losses(self) -> list[str]:
        """The losses that the rows suffice for; the first is what ``auto`` takes."""
        return [
            name
            for name, facts in LOSSES.items()
            if facts.scored == bool(self.score_column) and facts.texts <= len(self.text_columns)
        ]

    def columns(self, names: DataConfig) -> tuple[str, ...]:
        """Return the columns with texts and the score."""
        return self.text_columns + ((self.score_column,) if self.score_column else ())

    def texts(self, row: Row, names: DataConfig) -> list[str]:
        """Return the texts of a row, in the order of the columns."""
        return [_text_of(row, column) for column in self.text_columns]

    def score(self, row: Row) -> float:
        """Return the score of a row."""
        score = row.value[self.score_column]
        is_number = isinstance(score, (int, float)) and not isinstance(score, bool)
        if not is_number or not abs(score) <= _MOST_SCORE:  # not even NaN
            fault = f"'{self.score_column}' must be a number, but is {_shown(score)}."
            raise row.error(fault, "wrong type")
        return float(score)


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


# A row is of the first format that it matches; mlx-lm has the same order.
TOKEN_FORMATS: tuple[TokenFormat, ...] = (Completion(), Chat(), Text())
PAIR_FORMATS: tuple[PairFormat, ...] = (ScoredPairs(), Triplets(), AnchorPairs())
FORMATS: tuple[RowFormat, ...] = (*TOKEN_FORMATS, *PAIR_FORMATS)


def format_of(row: Row, names: DataConfig, formats: Sequence[RowFormat] = FORMATS) -> RowFormat:
    """Return the first of ``formats`` that a row matches; a row without one is an error."""
    if not isinstance(row.value, Mapping):
        fault = f"must be a JSON object, but is a {type(row.value).__name__}."
        raise row.error(fault, "not an object")
    for row_format in formats:
        if row_format.matches(row, names):
            return row_format
    columns = " or ".join("{" + ", ".join(each.columns(names)) + "}" for each in formats)
    fault = f"must have the columns {columns}, but has {_shown(sorted(row.value)) if row.value else 'none'}."
    if any(isinstance(each, TokenFormat) for each in formats):
        flags = "--chat-feature, --prompt-feature, --completion-feature, --text-feature"
        raise row.error(f"{fault} Other names: {flags}.", "missing columns")
    raise row.error(f"{fault} Other examples are for --task lm.", "missing columns", "task")


def check_format(
    row: Row,
    row_format: RowFormat,
    first: str,
    names: DataConfig,
    formats: Sequence[RowFormat] = FORMATS,
) -> None:
    """Raise an error where a row is of another format than that of the row called ``first``."""
    if (other := format_of(row, names, formats)) is not row_format:
        raise row.error(
            f"mixed formats: this example is {other.name}, but {first} is {row_format.name}.",
            "another format",
        )


def first_format(
    rows: Sequence[Row], names: DataConfig, formats: Sequence[RowFormat] = FORMATS
) -> tuple[Row, RowFormat]:
    """Return the first row that can be read and has one of ``formats``, and that format.

    Raises:
        RowError: that of the first row, if it stops the run (``names.on_bad_row``) or no row has one.
    """
    first = None
    for row in rows:
        try:
            return row, format_of(row, names, formats)
        except RowError as error:
            if names.on_bad_row == "stop":
                raise
            first = first or error
    raise first or PackError("--data: the split has no examples.", "data")


def check_unicode(row: Row, text: str) -> None:
    """Raise a PackError where a text cannot be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        fault = "has half of a surrogate pair (\\ud800 to \\udfff)."
        raise row.error(fault, "half a surrogate pair") from None


def _text_of(row: Row, column: str) -> str:
    """Return the text of a column; what is no text is an error."""
    if not isinstance(text := row.value[column], str):
        raise row.error(f"'{column}' must be a text, but is {_shown(text)}.", "wrong type")
    return text


def _shown(value: Any) -> str:
    """Return the beginning of a value; not even an integer of a million digits is an error."""
    try:
        return f"{value!r:.60}"
    except (ValueError, RecursionError):
        return f"a {type(value).__name__}"
