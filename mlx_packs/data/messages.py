"""Messages and tools as the chat template takes them, whatever dialect a row has.

Roles, calls of tools and thoughts have other names in the data of other programs; an answer may be
marked as no target. Tools and their calls have OpenAI's form, with arguments as an object: training
and serving render them in it. A fault is a ValueError whose text says what is wrong.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time
from pathlib import Path
from typing import Any

from .images import content_of, with_own_images
from .row_format import MOST_DEPTH, shown

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
# Keys of an answer by which it is a target or not, with the value that makes it one.
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
_ARGUMENTS = ("arguments", "parameters", "args", "input")  # of a call, as others call them too
# Keys of a call that say nothing which its name and arguments do not.
_OTHER_KEYS = ("id", "type", "index", "parsed_arguments")
_CALL_KEYS = {"function", "name", *_ARGUMENTS, *_OTHER_KEYS}
_NO_CALL = "a call of a tool must be an object with a 'name' and 'arguments'."
_WRITTEN_THOUGHTS = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)


@dataclass(frozen=True)
class Turn:
    """A message, and whether an answer is a target."""

    message: dict[str, Any]
    is_target: bool = True


def turns_of(messages: Sequence[Any]) -> list[Turn]:
    """Return messages in the form of chat templates; images are relative to the current folder."""
    turns: list[Turn] = []
    for message in messages:
        turns.append(turn_after(turns, message, None))
    return turns


def turn_after(turns: Sequence[Turn], message: Any, folder: Path | None) -> Turn:
    """Return the message that follows others, as `turns_of`."""
    turn = _turn(message, folder)
    is_call = (message.get("role") or message.get("from")) in _CALLS
    if is_call and turns and turns[-1].message["role"] == "assistant":
        raise ValueError(
            "a call follows an answer or another call. Write them as one answer: its text, and a "
            "list of 'tool_calls'."
        )
    return turn


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

    if speaker in _CALLS:
        calls += normal_calls(content)
        content = None
        if not calls:
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
        _check_thoughts(normal)
    return Turn(normal, is_target)


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


def _check_thoughts(message: dict[str, Any]) -> None:
    """Raise a ValueError if an answer has thoughts in its content and under a key, too."""
    written = _WRITTEN_THOUGHTS.match(message["content"])
    if written is None or not message.get(THOUGHTS[0]) or not written[1].strip():
        return

    raise ValueError(
        f"an answer has thoughts in its content and in '{THOUGHTS[0]}'. Keep one of them."
    )


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


def normal_arguments(value: Any) -> dict[str, Any]:
    """Return the arguments of a call as an object.

    In an object a null is padding (of Arrow) and left out; a JSON text stays as it is written; None
    is a call without arguments.
    """
    return _arguments(without_padding(value))


def _arguments(value: Any) -> dict[str, Any]:
    """The same for arguments without padding."""
    if isinstance(value, str):
        value = _parsed(value, "the arguments of a call are") if value.strip() else None
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError("the arguments of a call must be an object.")
    return json_value(value, "the arguments of a call have")


def _normal_call(call: Any) -> dict[str, Any]:
    """Return ``{id, type, function: {name, arguments}}``, without an id if the call has none."""
    function = (call.get("function") or {}) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise ValueError(_NO_CALL)

    given = {key: value for key, value in {**call, **function}.items() if value is not None}
    if unknown := [key for key in given if key not in _CALL_KEYS]:
        raise ValueError(
            f"a call of a tool has the unknown key {shown(unknown[0])}. Write its arguments under "
            "'arguments', and remove other keys."
        )

    name = given.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError(_NO_CALL)

    arguments = [each for key in _ARGUMENTS if (each := _arguments(given.get(key)))]
    if any(each != arguments[0] for each in arguments[1:]):
        raise ValueError("a call of a tool has different arguments under several keys.")

    function = {"name": name, "arguments": next(iter(arguments), {})}
    normal = {"type": "function", "function": function}
    if call.get("id") is not None:
        normal = {"id": call["id"], **normal}
    return normal


def normal_calls(calls: Any) -> list[dict[str, Any]]:
    """Return the calls of a message: a list of them, one of them, or the JSON text of either.

    A null outside such a text is padding; an object of nothing but nulls is no call.
    """
    calls = _listed(calls, "the calls of tools are", "'tool_calls' must be a list of calls.")
    return [_normal_call(call) for call in calls if is_given(call)]


def normal_tools(tools: Any) -> list[Any] | None:
    """Return tools as ``{type: function, function: {name, ...}}``; None without any.

    They are a list or a single one, and each may be a JSON text. A null is padding, unless it is
    in such a text; an object that has only nulls is no tool.
    """
    tools = _listed(tools, "'tools' is", "'tools' must be a list of tools.")
    return [_normal_tool(tool) for tool in tools if is_given(tool)] or None


def _normal_tool(tool: Any) -> dict[str, Any]:
    if isinstance(tool, str):
        tool = _parsed(tool, "a tool is")
    if not isinstance(tool, Mapping):
        raise ValueError("a tool must be an object.")

    function = tool.get("function")
    is_bare = isinstance(tool.get("name"), str)
    if not isinstance(function, Mapping):
        if not is_bare:
            return json_value(tool, "a tool has")  # of a kind that the template may know
        function = {key: value for key, value in tool.items() if key != "type"}
        tool = {}

    if isinstance(schema := function.get("parameters"), str):
        parameters: Any = {}
        if schema.strip():
            parameters = _parsed(schema, "the 'parameters' of a tool are")
        function = {**function, "parameters": parameters}

    # for who decodes the answer; a prompt with it would be another one than in training
    function = {key: value for key, value in function.items() if key != "strict"}
    return json_value({"type": "function", **tool, "function": function}, "a tool has")


def _listed(value: Any, what: str, fault: str) -> Sequence[Any]:
    """Return a list, of what may be one of its items, or the JSON text of either.

    A null outside such a text is padding; ``what`` begins the error of a text that is no JSON.
    """
    if isinstance(value, str):
        value = _parsed(value, what) if value.strip() else None
    else:
        value = without_padding(value)

    if isinstance(value, Mapping):
        return [value]
    if value is None:
        return []
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ValueError(fault)
    return value


def is_given(value: Any) -> bool:
    """Whether a value is more than nulls: Arrow may write an object of nulls for no value."""
    rest = [value]
    while rest:
        part = rest.pop()
        if isinstance(part, Mapping):
            rest += part.values()
        elif part is not None:
            return True
    return False


def without_padding(value: Any) -> Any:
    """Remove the keys that are null: Arrow gives every object all keys."""
    if isinstance(value, Mapping):
        return {key: without_padding(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [without_padding(item) for item in value]
    return value


def _parsed(text: str, what: str) -> Any:
    """``what`` begins the sentence of the error."""

    def reject(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    try:
        return json.loads(text, parse_constant=reject)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} not valid JSON: {error}.") from None


def json_value(value: Any, what: str, place: str = "", depth: int = 0) -> Any:
    """Return a value as JSON has it: dates and times as ISO text.

    A ValueError names a part of another type, NaN or infinity, and a nesting deeper than a line
    may have: ``what`` begins its sentence, ``place`` is where the value is, at ``depth``.
    """
    if value is None or isinstance(value, (str, int)):
        return value
    if depth >= MOST_DEPTH:
        raise ValueError(f"{what} lists and objects that are nested more than {MOST_DEPTH} deep.")

    if isinstance(value, Mapping):
        places = {key: f"{place}.{key}".lstrip(".") for key in value}
        if others := [key for key in places if not isinstance(key, str)]:
            raise ValueError(f"{what} the key {shown(others[0])}, which is no text.")
        return {key: json_value(item, what, places[key], depth + 1) for key, item in value.items()}

    if isinstance(value, (list, tuple)):
        items = enumerate(value)
        return [json_value(item, what, f"{place}[{i}]", depth + 1) for i, item in items]

    is_number = isinstance(value, float)
    if is_number and math.isfinite(value):
        return value
    if isinstance(value, (date, time)) and value == value:  # pandas' NaT is a date
        return value.isoformat()

    fault = f"{value}" if is_number else f"a {type(value).__name__}"
    raise ValueError(
        f"{what}, in '{place:.60}', {fault}, which JSON does not have. Write it as a text or leave "
        "it out."
    )
