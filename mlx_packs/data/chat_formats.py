"""Formats of rows that are conversations."""

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from ..config.schema import DataConfig
from ..errors import PackError
from .conversations import Conversation, Span
from .row_format import Row, TokenFormat, optional, shown, text_of


class ConversationFormat(TokenFormat):
    """Rows that are conversations, which the base's chat template renders."""

    @abstractmethod
    def messages(self, row: Row, names: DataConfig) -> list[Mapping]:
        """Return the messages of a row, as the chat template takes them."""

    def conversation(self, row: Row, names: DataConfig, tokenizer: Any) -> Conversation:
        """Return the messages of a row with their tools, which may be a JSON text."""
        messages, tools = self.messages(row, names), optional(row, "tools")
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
        """Return the messages before the answer that is asked for."""
        conversation = self.conversation(row, names, tokenizer)
        messages = list(conversation.messages)[: self._asked(conversation.messages)]
        return messages[-1].get("content") or "", conversation.prompt_tokens(messages)

    def answer(self, row: Row, names: DataConfig) -> str | None:
        """Return the content of the answer that is asked for."""
        messages = self.messages(row, names)
        answers = messages[self._asked(messages) :][:1]
        return next((m.get("content") for m in answers if m["role"] == "assistant"), None)

    def texts(self, row: Row, names: DataConfig) -> list[str]:
        """Return the content of each message."""
        return [text for m in self.messages(row, names) if (text := m.get("content"))]

    def _asked(self, messages: Sequence[Mapping]) -> int:
        """Return the number of the message that a model is asked for.

        It is the last one where a completion is trained, and else the first answer to a message.
        """
        if self.loss_on == "completion":
            return len(messages) - 1
        roles = [message["role"] for message in messages]
        return roles.index("assistant", 1) if "assistant" in roles[1:] else 1


class Chat(ConversationFormat):
    """Messages with roles, and the tools that they may call."""

    name = "chat"
    loss_on = "assistant"

    def columns(self, names: DataConfig) -> tuple[str, ...]:
        """Return the column with the messages."""
        return (names.chat_feature,)

    def messages(self, row: Row, names: DataConfig) -> list[Mapping]:
        """Return the messages of a row, as the chat template takes them."""
        messages = _listed(row, names.chat_feature, "{role, content}")
        return _checked(row, messages)


class Completion(ConversationFormat):
    """A prompt and its completion, most often of one message each."""

    name = "completion"
    loss_on = "completion"

    def columns(self, names: DataConfig) -> tuple[str, ...]:
        """Return the columns with the prompt and the completion."""
        return (names.prompt_feature, names.completion_feature)

    def messages(self, row: Row, names: DataConfig) -> list[Mapping]:
        """Return the prompt as the user's message, the completion as the assistant's.

        Either may be a list of messages, as TRL has it.
        """
        _check_alpaca_is_whole(row, names)
        messages: list[Mapping] = []
        for role, column in zip(("user", "assistant"), self.columns(names), strict=True):
            if isinstance(row.value[column], list):
                messages += _checked(row, _listed(row, column, "{role, content}"))
            else:
                messages.append({"role": role, "content": text_of(row, column)})
        return messages


class Alpaca(ConversationFormat):
    """An instruction, what it is about (``input``, often empty), and the output.

    Stanford Alpaca's columns (https://github.com/tatsu-lab/stanford_alpaca), and LLaMA-Factory's
    ``system`` and ``history``. All of it is rendered by the base's chat template.
    """

    name = "alpaca"
    loss_on = "completion"

    def columns(self, names: DataConfig) -> tuple[str, ...]:
        """Return the columns that every row has."""
        return ("instruction", "output")

    def messages(self, row: Row, names: DataConfig) -> list[Mapping]:
        """Return system message, earlier turns, the instruction with its input, and the output."""
        values = {"input": "", "system": "", "history": []}
        values |= {key: value for key in values if (value := optional(row, key)) is not None}
        parts = [text_of(row, "instruction")]
        for key in ("input", "system"):
            if not isinstance(values[key], str):
                raise row.error(
                    f"'{key}' must be a text, but is {shown(values[key])}.", "wrong type"
                )
        parts += [values["input"]] if values["input"].strip() else []
        messages = [{"role": "system", "content": values["system"]}] if values["system"] else []
        for turn in values["history"] if isinstance(values["history"], list) else [None]:
            if not (isinstance(turn, list) and [type(text) for text in turn] == [str, str]):
                fault = "'history' must be a list of [question, answer]."
                raise row.error(fault, "wrong type")
            messages += _turn(*turn)
        return messages + _turn("\n\n".join(parts), text_of(row, "output"))


class ShareGPT(ConversationFormat):
    """Turns with ``from`` and ``value`` (or ``role`` and ``content``), as ShareGPT exports them."""

    name = "sharegpt"
    loss_on = "assistant"

    def columns(self, names: DataConfig) -> tuple[str, ...]:
        """Return the column with the turns."""
        return ("conversations",)

    def messages(self, row: Row, names: DataConfig) -> list[Mapping]:
        """Return the turns as messages; a column ``system`` is the first of them."""
        messages: list[Mapping] = []
        if isinstance(system := row.value.get("system"), str) and system:
            messages.append({"role": "system", "content": system})
        for turn in _listed(row, "conversations", "{from, value}"):
            if isinstance(turn, Mapping) and "role" in turn:
                messages += _checked(row, [turn])
                continue
            speaker = turn.get("from") if isinstance(turn, Mapping) else None
            if not isinstance(speaker, str) or speaker not in _ROLES:
                roles = ", ".join(_ROLES)
                fault = f"'from' must be one of {roles}, but is {shown(speaker)}."
                raise row.error(fault, "wrong type")
            if not isinstance(text := turn.get("value"), str):
                raise row.error(f"'value' must be a text, but is {shown(text)}.", "wrong type")
            messages.append({"role": _ROLES[speaker], "content": text})
        return messages


# Who speaks in ShareGPT's data, and in what is made like it.
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "system": "system",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "tool": "tool",
}


def _turn(question: str, answer: str) -> list[Mapping]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _listed(row: Row, column: str, of: str) -> list:
    """Return a column that is a list with something in it."""
    messages = row.value[column]
    if messages == []:
        raise _fault(row, f"'{column}' must contain at least one message.", messages)
    if not isinstance(messages, list):
        rule = f"'{column}' must be a list of {of}, but is a {type(messages).__name__}."
        raise _fault(row, rule, messages)
    return messages


def _checked(row: Row, messages: list) -> list[Mapping]:
    """Return messages as a chat template takes them; content in parts is joined to one text."""
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise _fault(row, "every message must be an object with a 'role'.", message)
        content = message.get("content")
        is_call = content is None and message.get("tool_calls")
        if not isinstance(content, (str, list)) and not is_call:
            raise _fault(row, "the 'content' of a message must be a text.", message)
    return [
        {**message, "content": _joined(row, content)}
        if isinstance(content := message.get("content"), list)
        else message
        for message in messages
    ]


def _joined(row: Row, parts: list) -> str:
    """Return the text of a message in parts, as OpenAI's API has them."""
    for part in parts:
        is_text = isinstance(part, Mapping) and part.get("type") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            rule = "the 'content' of a message must be a text, or parts of type 'text' alone."
            raise _fault(row, rule, parts)
    return "".join(part["text"] for part in parts)


def _check_alpaca_is_whole(row: Row, names: DataConfig) -> None:
    """Raise a PackError where the named columns are Alpaca's and would leave out its input."""
    if names.prompt_feature == "instruction" and optional(row, "input"):
        raise row.conflict(
            "has an 'input', which --prompt-feature instruction leaves out. Give neither "
            "--prompt-feature nor --completion-feature: rows with instruction, input and output are "
            "read as they are.",
            "conflict",
            "prompt_feature",
        )


def _fault(row: Row, rule: str, value: Any) -> PackError:
    text = json.dumps(value, ensure_ascii=False, default=str)
    text = text if len(text) < 60 else text[:60] + "…"
    return row.error(f"{rule} Shown: {text}", "wrong type")
