"""The parts of a conversation that a chat template leaves out.

A conversation is rendered with a part of it and with another in its place: the same text means
that the part is lost.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from ..bases.chat_template import template_file
from ..errors import PackError
from .conversations import Conversation
from .messages import THOUGHTS
from .row_format import RowError

_THINK = "<think>"
_END_THINK = "</think>"
_OTHER = "\ue000other\ue002"  # in place of a part; private use, in no sane text
_MOST_SHAPES = 1000
_REQUIRED = ("messages of", "tools", "calls of tools")  # kinds of parts
_REMEDIES = {
    "thoughts": "Use a base whose chat template keeps them (a training template), or write them "
    "into the content without <think> tags",
    "tools": "Use a base whose chat template has tools, or describe them in the system message",
    "calls of tools": "Use a base whose chat template has tools, or write them into the content",
}


def check_rendered(conversation: Conversation) -> None:
    """Raise a PackError if the chat template leaves out a message, a call or a tool.

    Thoughts of earlier answers are left out on purpose.
    """
    tokenizer = conversation.tokenizer
    rendered = tokenizer.__dict__.setdefault("_rendered_shapes", set())
    if len(rendered) > _MOST_SHAPES:
        rendered.clear()

    for kind, place in lost_parts(conversation, rendered, lambda kind: kind.startswith(_REQUIRED)):
        raise PackError(
            f"{template_file(tokenizer)}: the chat template leaves out {kind}{place}. "
            f"{remedy(kind)}.",
            "data",
            "messages",
        )


def lost_parts(
    conversation: Conversation, rendered: set[tuple], is_checked: Callable[[str], bool]
) -> Iterator[tuple[str, str]]:
    """Yield kind and place of each part that the template leaves out, of kinds that are checked.

    ``rendered`` has shapes whose parts are rendered: they are not checked again; others are added.
    """
    context = (str(conversation.tokenizer.chat_template), repr(conversation.variables))
    text = ""
    for place, (kind, *rest), changed in _parts(conversation):
        shape = (kind, *rest, *context)
        if shape in rendered or not is_checked(kind):
            continue

        try:
            text = text or conversation.render(conversation.messages)
            is_lost = changed.render(changed.messages) == text
        except RowError:  # the template does not take the one or the other
            continue
        if is_lost:
            yield kind, place
        else:
            rendered.add(shape)


def remedy(kind: str) -> str:
    """Return what to do about a kind of part that the chat template leaves out."""
    default = "Write it into messages that the template renders, or remove it"
    return _REMEDIES.get(kind, default)


def _parts(conversation: Conversation) -> Iterator[tuple[str, tuple, Conversation]]:
    """Yield place and shape of each part, and the conversation with another in its place.

    Parts of one shape, which begins with their kind, are rendered alike, or not at all.
    """
    tools = conversation.tools or []
    for i in range(len(tools)):
        others = [*tools[:i], *tools[i + 1 :]] or None
        yield "", ("tools", bool(others), i > 0), replace(conversation, tools=others)

    messages = conversation.messages
    answers = 0
    before = None
    for i, message in enumerate(messages):
        is_answer = message["role"] == "assistant"
        place = f", message {i + 1}"
        if is_answer:
            answers += 1
            place = f", answer {answers}"

        earlier: set[str] = set()  # kinds of parts of this message
        for kind, other in _parts_of(message, is_answer):
            shape = kind, before, i == len(messages) - 1, kind in earlier
            changed = [*messages[:i], other, *messages[i + 1 :]]
            yield place, shape, replace(conversation, messages=changed)
            earlier.add(kind)
        before = message["role"]


def _parts_of(message: Mapping, is_answer: bool) -> Iterator[tuple[str, dict]]:
    """Yield the kind of each part, and the message with another in its place."""
    content: str = message["content"]
    before, end, visible = content.rpartition(_END_THINK) if is_answer else ("", "", content)
    _, begin, thought = before.rpartition(_THINK)

    if end and begin and thought.strip():
        other = f"{before.removesuffix(thought)}{_OTHER}{end}{visible}"
        yield "thoughts", {**message, "content": other}
    elif is_answer and any(message.get(key) for key in THOUGHTS):
        yield "thoughts", {**message, **dict.fromkeys(THOUGHTS, _OTHER)}

    if visible.strip():
        role = message["role"]
        yield f"messages of {role}", {**message, "content": f"{before}{end}{_OTHER}"}

    calls = message.get("tool_calls") or []
    for i, call in enumerate(calls):
        function = call["function"]
        changed = {"arguments": {_OTHER: _OTHER}} if function["arguments"] else {"name": _OTHER}
        others = [*calls[:i], {**call, "function": {**function, **changed}}, *calls[i + 1 :]]
        yield "calls of tools", {**message, "tool_calls": others}
