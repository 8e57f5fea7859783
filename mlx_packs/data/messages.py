"""Messages as the chat template takes them, whatever dialect a row has.

Roles, calls of tools and thoughts have other names in the data of other programs; an answer may be
marked as no target. A fault is a ValueError whose text says what is wrong.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .images import content_of, with_own_images
from .row_format import shown
from .tool_calls import WRITTEN_THOUGHTS, calls_in_text, normal_calls

# Other names of roles: of ShareGPT, LLaMA-Factory, ms-swift, and older ones of OpenAI.
ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "developer": "system",
}
_OWN_ROLES = ("system", "user", "assistant", "tool")  # of chat templates
_CALLS = ("function_call", "tool_call")  # roles whose content is calls
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # keys of an answer, one name each
_JOINED = {"content", "tool_calls"}  # of messages that belong to one answer
# Keys of an answer by which it is a target or not; their value is that of a target.
_MARKS = {
    "weight": True,  # OpenAI, Mistral
    "train": True,  # Axolotl
    "training": True,
    "trainable": True,
    "loss": True,  # ms-swift, XTuner
    "loss_weight": True,  # LLaMA-Factory
    "masked": False,  # torchtune
}
# Marks that are for parts of an answer, or that programs read in opposite ways.
_OTHER_MARKS = ("mask", "train_detail", "training_detail", "loss_scale")


@dataclass(frozen=True)
class Turn:
    """A message, and whether an answer is a target; ``calls`` is one that is nothing but calls."""

    message: dict[str, Any]
    is_target: bool = True
    calls: bool = False


def turns_of(messages: Sequence[Any], folder: Path | None = None) -> list[Turn]:
    """Put calls that follow an answer, or other calls, into one message.

    Paths of images are relative to ``folder``, by default to the current one.
    """
    turns: list[Turn] = []
    for message in messages:
        turn = _turn(message, folder)
        before = turns[-1] if turns else None
        if turn.calls and before is not None and before.message["role"] == "assistant":
            turns[-1] = _joined(before, turn)
            continue

        turns.append(turn)

    return turns


def last_turn_start(messages: Sequence[Any]) -> int:
    """Return where the last turn begins: an answer, and the calls that follow it."""
    start = len(messages) - 1
    while start > 0 and _speaker(messages[start]) in _CALLS:
        before = _speaker(messages[start - 1])
        if ROLES.get(before, before) != "assistant":
            break
        start -= 1
    return start


def _speaker(message: Any) -> str:
    """Return the role as the dialect names it; an empty text without one."""
    if not isinstance(message, Mapping):
        return ""
    speaker = message.get("role")
    if speaker is None:
        speaker = message.get("from")
    return speaker if isinstance(speaker, str) else ""


def _joined(before: Turn, turn: Turn) -> Turn:
    """Return an answer with the calls that follow it, and everything that either message says."""
    if before.is_target is not turn.is_target:
        raise ValueError("calls that belong to one answer have different marks.")

    first = before.message
    second = turn.message
    for key in (first.keys() & second.keys()) - _JOINED:
        if first[key] != second[key]:
            raise ValueError(
                f"messages that belong to one answer differ in '{key}'. Remove it from the calls."
            )

    contents = [text for text in (first["content"], second["content"]) if text]
    if len(contents) > 1 and WRITTEN_THOUGHTS.match(contents[1]):
        raise ValueError("calls that follow an answer have thoughts. Write these into the answer.")

    message = {**second, **first, "content": "\n".join(contents)}
    message["tool_calls"] = [*first.get("tool_calls", ()), *second["tool_calls"]]
    return replace(before, message=message)


def _turn(message: Any, folder: Path | None) -> Turn:
    """Return a message in the form of chat templates, with its mark."""
    if not isinstance(message, Mapping):
        raise ValueError("every message must be an object with a 'role'.")

    given = {key: value for key, value in message.items() if value is not None}
    if "role" not in given and "from" in given:
        _rename_sharegpt(given)

    if not isinstance(speaker := given.get("role"), str):
        raise ValueError("every message must be an object with a 'role'.")

    role = ROLES.get(speaker, speaker)
    is_target = _popped_mark(given, role)
    content, images = content_of(given.get("content"), folder)
    calls = normal_calls(given.pop("tool_calls", None))
    older_calls = normal_calls(given.pop("function_call", None))
    if calls and older_calls:
        raise ValueError("a message has both 'tool_calls' and 'function_call'.")
    calls = calls or older_calls

    if speaker in _CALLS and content is not None:
        content, written = calls_in_text(content)
        calls += written
    if speaker in _CALLS and not calls:
        raise ValueError(f"a message of {speaker} must have the JSON of a call.")

    is_thoughts = role == "assistant" and any(given.get(key) for key in THOUGHTS)
    if content is None and not calls and not is_thoughts:
        raise ValueError("the 'content' of a message must be a text.")

    normal = {**given, "role": role, "content": content or ""}
    normal = with_own_images(normal, images)
    if calls:
        normal["tool_calls"] = calls
    if role == "assistant":
        name_thoughts(normal)
        _write_thoughts_once(normal)
    return Turn(normal, is_target, speaker in _CALLS)


def _rename_sharegpt(given: dict[str, Any]) -> None:
    speaker = given.pop("from")
    text = given.pop("value", None)
    if not isinstance(speaker, str) or speaker not in (*_OWN_ROLES, *ROLES):
        roles = ", ".join((*_OWN_ROLES, *ROLES))
        raise ValueError(f"'from' must be one of {roles}, but is {shown(speaker)}.")
    if not isinstance(text, str):
        raise ValueError(f"'value' must be a text, but is {shown(text)}.")
    given["role"] = speaker
    given["content"] = text


def name_thoughts(message: dict[str, Any]) -> None:
    """Write the thoughts of an answer under every key by which templates know them."""
    thoughts = {message[key] for key in THOUGHTS if isinstance(message.get(key), str)} - {""}
    if len(thoughts) > 1:
        raise ValueError(f"an answer has different thoughts in {', '.join(THOUGHTS)}.")
    if thoughts:
        message.update(dict.fromkeys(THOUGHTS, thoughts.pop()))


def _write_thoughts_once(message: dict[str, Any]) -> None:
    """Remove thoughts from the content of an answer that has them under a key, too."""
    written = WRITTEN_THOUGHTS.match(message["content"])
    thoughts = message.get(THOUGHTS[0])
    if written is None or not thoughts or not written[1].strip():
        return

    if written[1].strip() != thoughts.strip():
        raise ValueError(
            f"an answer has other thoughts in its content than in '{THOUGHTS[0]}'. Keep one of "
            "them."
        )
    message["content"] = message["content"][written.end() :]


def _popped_mark(given: dict[str, Any], role: str) -> bool:
    """Take the marks out of a message, and return whether it may be a target."""
    for key in _OTHER_MARKS:
        if key in given:
            raise ValueError(
                f"'{key}' of a message is not supported. Mark an answer that is not to be trained "
                "on with 'weight': 0."
            )

    marks = {}
    for key in [key for key in given if key in _MARKS]:
        value = given.pop(key)
        if not isinstance(value, (bool, int, float)) or value not in (0, 1):
            raise ValueError(f"'{key}' of a message must be 0 or 1, but is {shown(value)}.")
        marks[key] = bool(value) is _MARKS[key]

    if len(set(marks.values())) > 1:
        raise ValueError(f"{' and '.join(marks)} of a message contradict each other.")

    if role != "assistant" and any(marks.values()):
        raise ValueError(
            f"'{next(iter(marks))}' marks a message of {role} as a target, but only answers of the "
            "assistant are trained on. Remove the mark."
        )

    return all(marks.values())
