"""What rows say that no token shows: unused columns, and parts the chat template leaves out.

A conversation is rendered with a part of it and with another in its place: the same text means
that the part is lost. For each kind of part, the first conversations that have it are checked.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from ..bases.chat_template import unread_variables
from ..bases.templated import with_template
from ..bases.turns import answer_end_note
from ..config.data import DataConfig
from ..errors import PackError
from .bad_rows import RowError
from .chat_formats import CONVERSATION_COLUMNS, ConversationFormat
from .conversations import Conversation
from .formats import COMPLETION, PREFERENCE, PROMPT, Row, RowFormat
from .messages import THOUGHTS
from .near_copies import compared
from .preferences import both_completions
from .prompts import with_placeholder
from .row_format import optional
from .sources import as_rows

_LOOKED_AT = 10_000  # rows of a larger split
_RENDERINGS = 300  # of a kind of part
_OTHER = "\ue000other\ue002"  # in place of a part; private use, in no sane text
_CLEAR = 20  # characters: a shorter text may stand elsewhere by chance
_MOST_NAMES = 8  # of columns that a note has
_READ_KEYS = {"role", "content", "images", "tool_calls", "tool_call_id", *THOUGHTS}
_THINK = "<think>"
_END_THINK = "</think>"
_REMEDIES = {
    "thoughts": "Use a base whose chat template keeps them (a training template), or write them "
    "into the content without <think> tags",
    "tools": "Use a base whose chat template has tools, or describe them in the system message",
    "calls of tools": "Use a base whose chat template has tools, or write them into the content",
    "documents": "Write them into the messages",
}
_REMEDY = "Write it into messages that the template renders, or remove it"


def left_out_notes(
    rows: Sequence[Row], row_format: RowFormat, names: DataConfig, tokenizer: Any
) -> list[str]:
    """Return a note for each kind of thing in rows that nothing is trained on.

    From more than `_LOOKED_AT` rows, blocks of that many are read.
    """
    unused: dict[str, None] = {}
    variables: dict[str, str] = {}  # and the first row that has it
    used = _used_columns(row_format, names)
    checks = _Checks()
    thoughts = _OpenedThoughts()

    for row in _readable(rows):
        if used is not None:
            columns = (column for column in row.value if column not in used)
            unused |= {c: None for c in columns if optional(row, c) is not None}

        for conversation in _conversations(row, row_format, names, tokenizer):
            checks.add(conversation)
            thoughts.add(conversation)
            variables = dict.fromkeys(conversation.variables, conversation.where) | variables

    unread = {name: variables[name] for name in unread_variables(tokenizer, variables)}
    notes = [*_unread_note(unread), *checks.notes(), *thoughts.notes()]
    if unused:
        notes.insert(0, f"columns that are not used: {_listed(list(unused))}")
    return notes


def template_notes(
    rows: Sequence[Row], row_format: RowFormat, names: DataConfig, tokenizer: Any
) -> list[str]:
    """Return `left_out_notes`, and a note on an unusual end of answers in rendered rows."""
    tokenizer = with_template(tokenizer, names.chat_template)
    notes = left_out_notes(rows, row_format, names, tokenizer)
    if _is_rendered(row_format) and (end := answer_end_note(tokenizer)):
        notes.append(end)
    return notes


def _is_rendered(row_format: RowFormat) -> bool:
    return isinstance(row_format, ConversationFormat) or row_format in (PREFERENCE, PROMPT)


def _readable(rows: Sequence[Row]) -> Iterator[Row]:
    """Leave out rows that cannot be read; a large split is read in blocks."""
    for _, row in compared(as_rows(rows), _LOOKED_AT):
        with suppress(RowError):  # encoding names such rows
            if isinstance(row.value, Mapping):
                yield row


def _unread_note(variables: dict[str, str]) -> list[str]:
    """``variables`` has the first row of each variable."""
    if not variables:
        return []
    return [
        f"the chat template does not read {_listed(list(variables))}, the first in "
        f"{next(iter(variables.values()))}. Check the names in --template-kwargs and in the column "
        "chat_template_kwargs"
    ]


def _listed(names: list[str]) -> str:
    text = ", ".join(names[:_MOST_NAMES])
    more = len(names) - _MOST_NAMES
    if more > 0:
        text += f" and {more} more"
    return text


def _used_columns(row_format: RowFormat, names: DataConfig) -> set[str] | None:
    """None means all: a reward function sees every column."""
    if row_format is PROMPT:
        return None

    used = set(row_format.columns(names))
    if isinstance(row_format, ConversationFormat):
        used |= set(row_format.optional_columns(names))
    if row_format is PREFERENCE:
        used |= {names.prompt_feature, *CONVERSATION_COLUMNS}
    return used


def _conversations(
    row: Row, row_format: RowFormat, names: DataConfig, tokenizer: Any
) -> Iterator[Conversation]:
    """Yield the conversations that the chat template renders; a bad row has none."""
    if not _is_rendered(row_format):
        return

    try:
        if row_format is PREFERENCE:
            for side in both_completions([row], names):
                yield COMPLETION.conversation(side, names, tokenizer)
        elif row_format is PROMPT:
            prompt = COMPLETION.conversation(with_placeholder(row, names), names, tokenizer)
            yield replace(prompt, messages=prompt.messages[:-1])
        elif isinstance(row_format, ConversationFormat) and row_format.matches(row, names):
            yield row_format.conversation(row, names, tokenizer)
    except (PackError, KeyError):  # encoding names such rows
        return


@dataclass(frozen=True)
class _Part:
    """A part of a conversation, and the conversation with another part in its place."""

    kind: str
    place: str  # in the conversation
    text: str | None  # kept if the rendered text has it; None is always rendered
    changed: Conversation


@dataclass
class _Check:
    """How many parts of a kind were checked and are lost, and where the first of them is."""

    checked: int = 0
    lost: int = 0
    first: str = ""


@dataclass
class _Checks:
    kinds: dict[str, _Check] = field(default_factory=dict)

    def add(self, conversation: Conversation) -> None:
        """Check the parts of a conversation, up to `_RENDERINGS` of each kind."""
        rendered: str | None = None
        for part in _parts(conversation):
            check = self.kinds.setdefault(part.kind, _Check())
            if check.checked >= _RENDERINGS:
                continue

            try:
                if rendered is None:
                    rendered = conversation.render(conversation.messages)
                is_lost = _is_lost(part, rendered)
            except RowError:  # the template does not take the one or the other
                continue

            check.checked += 1
            if is_lost:
                check.lost += 1
                check.first = check.first or f"{conversation.where}{part.place}"

    def notes(self) -> list[str]:
        return [
            f"the chat template leaves out {kind}: {check.lost:,} of {check.checked:,} checked, "
            f"the first in {check.first}. {_REMEDIES.get(kind, _REMEDY)}"
            for kind, check in self.kinds.items()
            if check.lost
        ]


@dataclass
class _OpenedThoughts:
    """How many last answers lack the thoughts that the prompt in use has opened for them."""

    checked: int = 0
    missing: int = 0
    first: str = ""
    places: dict[str, set[bool]] = field(default_factory=dict)  # of each row, what its sides lack

    def add(self, conversation: Conversation) -> None:
        """Check the last answer; only the first conversations are checked."""
        is_answer = conversation.messages[-1]["role"] == "assistant"
        if not is_answer or self.checked >= _RENDERINGS:
            return

        try:
            is_missing = _lacks_opened_thoughts(conversation)
        except RowError:  # the template does not take the prompt
            return

        self.checked += 1
        self.places.setdefault(conversation.where, set()).add(is_missing)
        if is_missing:
            self.missing += 1
            self.first = self.first or conversation.where

    def notes(self) -> list[str]:
        if not self.missing:
            return []

        note = (
            f"the chat template opens thoughts at the end of a prompt, but {self.missing:,} of "
            f"{self.checked:,} answers checked have none, the first in {self.first}: in use they "
            "would count as thoughts. Write thoughts into them, or set a variable of the template "
            "that turns thoughts off, as in --template-kwargs '{\"enable_thinking\": false}'"
        )
        if mixed := sum(len(lacks) > 1 for lacks in self.places.values()):
            note += (
                f". In {mixed:,} of these rows only one of the two answers has thoughts, so that "
                "their prompts differ"
            )

        return [note]


def _lacks_opened_thoughts(conversation: Conversation) -> bool:
    """Whether the prompt of the last answer ends with a mark that the answer lacks."""
    before = conversation.messages[:-1]
    prompt = conversation.render(before, True).rstrip()
    marks = (_THINK, getattr(conversation.tokenizer, "think_start", None) or _THINK)

    if not prompt.endswith(marks):
        return False
    return not conversation.render(conversation.messages).startswith(prompt)


def _is_lost(part: _Part, rendered: str) -> bool:
    """Whether the text of a conversation is the same without a part of it."""
    text = (part.text or "").strip()
    if len(text) >= _CLEAR and text in rendered:
        return False
    return part.changed.render(part.changed.messages) == rendered


def _parts(conversation: Conversation) -> Iterator[_Part]:
    for kind in ("tools", "documents"):
        listed = getattr(conversation, kind) or []
        for i in range(len(listed)):
            others = [*listed[:i], *listed[i + 1 :]] or None
            yield _Part(kind, "", None, replace(conversation, **{kind: others}))

    answers = 0
    for i, message in enumerate(conversation.messages):
        is_answer = message["role"] == "assistant"
        place = f", message {i + 1}"
        if is_answer:
            answers += 1
            place = f", answer {answers}"

        for kind, text, other in _parts_of(message, is_answer):
            messages = [*conversation.messages]
            messages[i] = other
            yield _Part(kind, place, text, replace(conversation, messages=messages))


def _parts_of(message: Mapping, is_answer: bool) -> Iterator[tuple[str, str | None, dict]]:
    """Yield kind and text of each part, and the message with another in its place."""
    content: str = message["content"]
    before, end, visible = content.rpartition(_END_THINK) if is_answer else ("", "", content)
    _, begin, thought = before.rpartition(_THINK)

    if end and begin and thought.strip():
        other = f"{before.removesuffix(thought)}{_OTHER}{end}{visible}"
        yield "thoughts", None, {**message, "content": other}
    elif is_answer and any(message.get(key) for key in THOUGHTS):
        yield "thoughts", None, {**message, **dict.fromkeys(THOUGHTS, _OTHER)}

    if visible.strip():
        role = message["role"]
        yield f"messages of {role}", visible, {**message, "content": f"{before}{end}{_OTHER}"}

    calls = message.get("tool_calls") or []
    for i, call in enumerate(calls):
        others = [*calls[:i], _other_call(call), *calls[i + 1 :]]
        yield "calls of tools", None, {**message, "tool_calls": others}

    for key in message.keys() - _READ_KEYS:
        yield f"'{key}' of messages", None, {k: v for k, v in message.items() if k != key}


def _other_call(call: Mapping) -> dict:
    """Change the arguments of a call, or its name if it has none."""
    other: dict = {"name": _OTHER}
    if call["function"]["arguments"]:
        other = {"arguments": {_OTHER: _OTHER}}
    return {**call, "function": {**call["function"], **other}}
