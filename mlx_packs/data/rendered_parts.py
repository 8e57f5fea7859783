"""The parts of a conversation that a chat template leaves out.

A conversation is rendered with a part of it and with another in its place: the same text means
that the part is lost.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from ..bases.chat_template import template_file
from ..errors import PackError
from .conversations import Conversation
from .messages import THOUGHTS
from .row_format import RowError

_READ_KEYS = {"role", "content", "images", "tool_calls", "tool_call_id", *THOUGHTS}
_THINK = "<think>"
_END_THINK = "</think>"
_OTHER = "\ue000other\ue002"  # in place of a part; private use, in no sane text
_CLEAR = 20  # characters: a shorter text may stand elsewhere by chance
_MOST_SHAPES = 1000
_REQUIRED = ("messages of", "tools", "calls of tools")  # kinds of parts
_REMEDIES = {
    "thoughts": "Use a base whose chat template keeps them (a training template), or write them "
    "into the content without <think> tags",
    "tools": "Use a base whose chat template has tools, or describe them in the system message",
    "calls of tools": "Use a base whose chat template has tools, or write them into the content",
}


@dataclass(frozen=True)
class Part:
    """A part of a conversation, and the conversation with another part in its place."""

    kind: str
    place: str  # in the conversation
    shape: tuple  # parts of one shape are rendered alike, or not at all
    text: str | None  # kept if the rendered text has it; None is always rendered
    change: Callable[[], Conversation]

    def is_lost(self, conversation: Conversation, rendered: str) -> bool:
        """Whether the text of a conversation is the same without this part."""
        text = (self.text or "").strip()
        if len(text) >= _CLEAR:
            count = sum(message["content"].count(text) for message in conversation.messages)
            if rendered.count(text) >= count:
                return False

        changed = self.change()
        return changed.render(changed.messages) == rendered


def check_rendered(conversation: Conversation) -> None:
    """Raise a PackError if the chat template leaves out a message, a call or a tool.

    Thoughts of earlier answers are left out on purpose.
    """
    tokenizer = conversation.tokenizer
    kept = tokenizer.__dict__.setdefault("_rendered_shapes", set())
    if len(kept) > _MOST_SHAPES:
        kept.clear()

    for part in lost_parts(conversation, kept, lambda kind: kind.startswith(_REQUIRED)):
        raise PackError(
            f"{template_file(tokenizer)}: the chat template leaves out {part.kind}{part.place}. "
            f"{remedy(part.kind)}.",
            "data",
            "messages",
        )


def lost_parts(
    conversation: Conversation, kept: set[tuple], is_checked: Callable[[str], bool]
) -> Iterator[Part]:
    """Yield the parts that the chat template leaves out, of kinds for which ``is_checked``.

    ``kept`` has shapes whose parts are rendered: these are not checked again, and others are added.
    """
    context = (str(conversation.tokenizer.chat_template), repr(conversation.variables))
    rendered: str | None = None
    for part in _parts(conversation):
        shape = (*part.shape, *context)
        if shape in kept or not is_checked(part.kind):
            continue

        try:
            if rendered is None:
                rendered = conversation.render(conversation.messages)
            is_lost = part.is_lost(conversation, rendered)
        except RowError:  # the template does not take the one or the other
            continue
        if is_lost:
            yield part
        else:
            kept.add(shape)


def remedy(kind: str) -> str:
    """Return what to do about a kind of part that the chat template leaves out."""
    default = "Write it into messages that the template renders, or remove it"
    return _REMEDIES.get(kind, default)


def _parts(conversation: Conversation) -> Iterator[Part]:
    tools = conversation.tools or []
    for i in range(len(tools)):
        others = [*tools[:i], *tools[i + 1 :]] or None
        change = partial(replace, conversation, tools=others)
        yield Part("tools", "", ("tools", bool(others), i > 0), None, change)

    answers = 0
    for i, message in enumerate(conversation.messages):
        is_answer = message["role"] == "assistant"
        place = f", message {i + 1}"
        if is_answer:
            answers += 1
            place = f", answer {answers}"

        before = conversation.messages[i - 1]["role"] if i else None
        is_last = i == len(conversation.messages) - 1
        earlier: set[str] = set()  # kinds of parts of this message
        for kind, text, other in _parts_of(message, is_answer):

            def change(i: int = i, other: Mapping = other) -> Conversation:
                messages = [*conversation.messages[:i], other, *conversation.messages[i + 1 :]]
                return replace(conversation, messages=messages)

            yield Part(kind, place, (kind, before, is_last, kind in earlier), text, change)
            earlier.add(kind)


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
        function = call["function"]
        changed = {"arguments": {_OTHER: _OTHER}} if function["arguments"] else {"name": _OTHER}
        others = [*calls[:i], {**call, "function": {**function, **changed}}, *calls[i + 1 :]]
        yield "calls of tools", None, {**message, "tool_calls": others}

    for key in message.keys() - _READ_KEYS:
        yield f"'{key}' of messages", None, {k: v for k, v in message.items() if k != key}
