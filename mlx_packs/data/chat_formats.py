"""Formats of rows that are conversations."""

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..config.data import DataConfig, renderer_argument
from ..errors import PackError
from .conversations import Conversation, PlainText
from .images import IMAGE_COLUMNS, with_column_images
from .messages import Turn, json_value, normal_tools, turn_after, without_padding
from .row_format import Row, RowFormat, messages_of, optional, text_of, unpacked, wrong_type

SYSTEM_COLUMNS = ("system", "system_prompt", "system_message")
TOOL_COLUMNS = ("tools", "functions")
# What a row says about its conversation beside the messages.
CONVERSATION_COLUMNS = (
    *SYSTEM_COLUMNS,
    *TOOL_COLUMNS,
    "chat_template_kwargs",
    *IMAGE_COLUMNS,
)
_PLACEHOLDER = "."  # a completion that is not read
_LEAST_WORDS = 3  # of a prompt: an answer may begin with a word of it


@dataclass(frozen=True, eq=False)
class TokenFormat(RowFormat):
    """Rows that a causal model trains on.

    Attributes:
        loss_on: What is supervised by default.
        special_tokens: Whether the tokenizer adds what begins and ends a text.
    """

    loss_on: str = "all"
    special_tokens: bool = False

    @abstractmethod
    def read(self, row: Row, names: DataConfig, tokenizer: Any = None) -> Conversation | PlainText:
        """Return what a row says; with a tokenizer, `for_tokenizer` it and its chat template."""

    def resolve_loss_on(self, loss_on: str | None) -> str:
        return loss_on or self.loss_on


@dataclass(frozen=True, eq=False)
class ConversationFormat(TokenFormat):
    """Rows that are conversations, which the base's chat template renders."""

    optional: tuple[str, ...] = CONVERSATION_COLUMNS

    @abstractmethod
    def turns(self, row: Row, names: DataConfig) -> list[Turn]:
        """Return the turns of a row without what its other columns say."""

    def read(self, row: Row, names: DataConfig, tokenizer: Any = None) -> Conversation:
        if unpacked(optional(row, "documents")):
            fault = "has 'documents', which prompts in use lack. Write them into the messages."
            raise row.error(fault, "wrong type")

        turns = self.turns(row, names)
        about = {column: optional(row, column) for column in CONVERSATION_COLUMNS}
        systems = {c: about[c] for c in SYSTEM_COLUMNS if c not in self.columns(names)}
        turns = _with_system_prompt(row, turns, systems)
        image_columns = {column: about[column] or None for column in IMAGE_COLUMNS}
        column = _filled(row, image_columns)
        images = image_columns.get(column or "")
        with row.faults("image"):
            messages = [turn.message for turn in turns]
            messages = with_column_images(messages, column, images, row.folder)

        conversation = Conversation(
            row.where,
            messages,
            _tools(row, {column: about[column] for column in TOOL_COLUMNS}),
            context=frozenset(i for i, turn in enumerate(turns) if not turn.is_target),
            variables={**names.template_kwargs, **_variables(row, about["chat_template_kwargs"])},
            template_date=names.template_date,
            asked=self._asked(turns),
            is_plain=self._is_plain(row, names) and not any(about.values()),
        )
        if tokenizer is None:
            return conversation
        return conversation.for_tokenizer(tokenizer, names.chat_template)

    def _is_plain(self, row: Row, names: DataConfig) -> bool:
        """Whether a row is one text and its continuation, which need no chat template."""
        return False

    def _asked(self, turns: Sequence[Turn]) -> int:
        """The last message of a completion, else the first answer that is a target."""
        if self.loss_on == "completion":
            return len(turns) - 1

        answers = (i for i, turn in enumerate(turns) if turn.message["role"] == "assistant")
        return next((i for i in answers if i and turns[i].is_target), 1)


@dataclass(frozen=True, eq=False)
class Chat(ConversationFormat):
    """Messages with roles."""

    name: str = "chat"
    required: tuple[str, ...] = ("chat_feature",)
    loss_on: str = "assistant"

    def turns(self, row: Row, names: DataConfig) -> list[Turn]:
        (column,) = self.columns(names)
        return _turns(row, _listed(row, column))


@dataclass(frozen=True, eq=False)
class Completion(ConversationFormat):
    """A prompt and its completion, most often of one message each."""

    name: str = "completion"
    required: tuple[str, ...] = ("prompt_feature", "completion_feature")
    loss_on: str = "completion"

    def turns(self, row: Row, names: DataConfig) -> list[Turn]:
        """Either column may have messages, as in TRL; what repeats the prompt is left out."""
        _check_alpaca_is_whole(row, names)
        columns = names.prompt_feature, names.completion_feature
        prompt, completion = prompt_and_completion(row, *columns)
        return prompt + completion

    def _is_plain(self, row: Row, names: DataConfig) -> bool:
        """As TRL: texts are joined, and messages need a template."""
        columns = (names.prompt_feature, names.completion_feature)
        return all(isinstance(row.value[name], str) for name in columns)


@dataclass(frozen=True, eq=False)
class Alpaca(ConversationFormat):
    """An instruction, its input (often empty), and the output.

    Columns of Stanford Alpaca (https://github.com/tatsu-lab/stanford_alpaca), and the ``system`` of
    LLaMA-Factory. The chat template of the base renders all of it, instead of Stanford's own
    prompt.
    """

    name: str = "alpaca"
    required: tuple[str, ...] = ("instruction", "output")
    optional: tuple[str, ...] = ("history", *CONVERSATION_COLUMNS)
    with_texts: tuple[str, ...] = ("instruction", "input", "output")
    loss_on: str = "completion"

    def turns(self, row: Row, names: DataConfig) -> list[Turn]:
        """Return the instruction with its input, and the output."""
        if unpacked(optional(row, "history")):
            fault = "has a 'history'. Write its turns and the last one as 'messages'."
            raise row.error(fault, "wrong type")

        parts = [text_of(row, "instruction")]
        about = optional(row, "input") or ""
        if not isinstance(about, str):
            raise wrong_type(row, "input", "a text")
        if about.strip():
            parts.append(about)

        question = {"role": "user", "content": "\n\n".join(parts)}
        answer = {"role": "assistant", "content": text_of(row, "output")}
        return _turns(row, [question, answer])


def _turns(row: Row, messages: list) -> list[Turn]:
    turns: list[Turn] = []
    for message in messages:
        try:
            turns.append(turn_after(turns, message, row.folder))
        except ValueError as error:
            raise _fault(row, str(error), message) from None
    return turns


def completion_row(row: Row, names: DataConfig, prompt: Any, completion: Any = _PLACEHOLDER) -> Row:
    """Return a prompt and its completion as a row, with the columns about their conversation."""
    about = {key: row.value[key] for key in CONVERSATION_COLUMNS if key in row.value}
    texts = {names.prompt_feature: prompt, names.completion_feature: completion}
    return row.with_value({**about, **texts})


def prompt_and_completion(
    row: Row, prompt_column: str, column: str
) -> tuple[list[Turn], list[Turn]]:
    """Return prompt and completion, without what the completion repeats of the prompt's messages.

    A system message that only the completion has belongs before the prompt. A completion that
    repeats the text of the prompt is an error: no rule says where the answer begins.
    """
    prompt = _side(row, "user", prompt_column)
    completion = _side(row, "assistant", column)
    roles = [turns[0].message["role"] for turns in (prompt, completion)]
    if roles[1] == "system" and roles[0] != "system":
        prompt = [completion[0], *prompt]
        completion = completion[1:]

    completion = completion[_repeated(prompt, completion) :]
    if not completion:
        raise row.error(f"'{column}' has no message after the prompt.", "empty")

    if _begins_with(completion[0].message["content"], prompt[-1].message["content"]):
        raise row.error(
            f"'{column}' starts with the text of the prompt, which would be in the example twice. "
            "Remove it there, or use examples with 'text'.",
            "wrong type",
        )

    return prompt, completion


def _side(row: Row, role: str, column: str) -> list[Turn]:
    """Return the turns of a column: its messages, or its text as a message of ``role``."""
    value = messages_of(row.value[column])
    if isinstance(value, Mapping):
        return _turns(row, [value])
    if isinstance(value, list):
        return _turns(row, _listed(row, column))
    return [Turn({"role": role, "content": text_of(row, column)})]


def _repeated(prompt: list[Turn], completion: list[Turn]) -> int:
    """Return how many messages of a completion are those that its prompt ends with."""
    if not completion or completion[0].message["role"] not in ("system", "user"):
        return 0

    first, second = ([_words_of(turn) for turn in turns] for turns in (prompt, completion))
    counts = range(min(len(first), len(second)), 0, -1)
    return next((n for n in counts if first[-n:] == second[:n]), 0)


def _words_of(turn: Turn) -> tuple:
    message = turn.message
    content = message["content"].strip()
    return message["role"], content, message.get("tool_calls"), message.get("images")


def _begins_with(completion: str, prompt: str) -> bool:
    """Whether a text repeats a prompt of at least `_LEAST_WORDS` words, and goes on after it."""
    prompt = prompt.strip()
    rest = completion.strip().removeprefix(prompt)
    is_repeated = rest != completion.strip() and rest[:1].isspace()
    return is_repeated and len(prompt.split()) >= _LEAST_WORDS


def _filled(row: Row, values: Mapping[str, Any]) -> str | None:
    """Return the column that has a value, None without one; several are a RowError."""
    filled = [column for column, value in values.items() if value is not None]
    if len(filled) > 1:
        raise row.error(f"has {' and '.join(filled)}. Remove one of them.", "wrong type")
    return next(iter(filled), None)


def _with_system_prompt(row: Row, turns: list[Turn], columns: Mapping[str, Any]) -> list[Turn]:
    """Return turns that begin with the system prompt of a column; two that differ are an error."""
    column = _filled(row, columns)
    if column is None:
        return turns
    if not isinstance(system := columns[column], str):
        raise wrong_type(row, column, "a text")

    first = turns[0].message
    if first["role"] != "system":
        return [Turn({"role": "system", "content": system}), *turns]
    if first["content"].strip() != system.strip():
        fault = "has a system message, and another one in a column. Remove one of them."
        raise row.error(fault, "wrong type")
    return turns


def _tools(row: Row, columns: Mapping[str, Any]) -> list | None:
    """The tools may be a JSON text, or in OpenAI's older column."""
    with row.faults():
        tools = {column: normal_tools(value) for column, value in columns.items()}
    return tools.get(_filled(row, tools) or "")


def _variables(row: Row, value: Any) -> Mapping[str, Any]:
    """Return variables of the chat template, from TRL's column."""
    variables = without_padding(unpacked(value)) or {}
    if not isinstance(variables, Mapping):
        raise wrong_type(row, "chat_template_kwargs", "an object")

    if taken := renderer_argument(variables):
        fault = f"'chat_template_kwargs': {taken} is not a variable of the template. Remove it."
        raise row.error(fault, "wrong type")

    with row.faults():
        return json_value(variables, "'chat_template_kwargs' has")


def _listed(row: Row, column: str) -> list:
    """Return a column, which must be a list with something in it."""
    messages = unpacked(row.value[column])
    if messages == []:
        raise _fault(row, f"'{column}' must contain at least one message.", messages)
    if not isinstance(messages, list):
        kind = type(messages).__name__
        rule = f"'{column}' must be a list of messages, or its JSON text, but is a {kind}."
        raise _fault(row, rule, messages)
    return messages


def _check_alpaca_is_whole(row: Row, names: DataConfig) -> None:
    """Raise a PackError if columns of Alpaca are named such that its input would be left out."""
    if names.prompt_feature == "instruction" and optional(row, "input"):
        raise row.conflict(
            "has an 'input', which --prompt-feature instruction leaves out. Give neither "
            "--prompt-feature nor --completion-feature: rows with instruction, input and output "
            "are read as they are.",
            "conflict",
            "prompt_feature",
        )


def _fault(row: Row, rule: str, value: Any) -> PackError:
    text = json.dumps(value, ensure_ascii=False, default=str)
    if len(text) >= 60:
        text = text[:60] + "…"
    return row.error(f"{rule} Shown: {text}", "wrong type")
