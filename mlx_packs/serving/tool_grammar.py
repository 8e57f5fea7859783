"""Tool calls that obey the schemas of their functions, as a grammar in llguidance's Lark.

Only calls that are JSON between marks, as mlx-lm's parser ``json_tools`` reads them, have a
grammar: ``<tool_call>``, a line with ``{"name": ..., "arguments": {...}}``, ``</tool_call>``.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from .protocol import Tool

# As templates write arguments; free white space could go on without end.
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def has_tool_grammar(tokenizer: Any) -> bool:
    """Return whether the calls of a model are JSON between marks."""
    module = getattr(tokenizer.tool_parser, "__module__", "")
    return tokenizer.has_tool_calling and module.endswith(".json_tools")


def tool_grammar(
    tokenizer: Any,
    tools: Sequence[Tool],
    state: str,
    must_call: bool,
    is_special: Callable[[int], bool],
) -> str:
    """Return the grammar of an answer with calls of some functions.

    Args:
        tokenizer: mlx-lm's wrapper, for which `has_tool_grammar` holds.
        tools: the functions; the arguments of a strict one obey its parameters.
        state: where the answer begins, as `first_state` has it.
        must_call: whether the answer is a call; else calls may stand anywhere in a text.
        is_special: whether a token is special to llguidance, and so no part of a text.
    """

    def mark(text: str) -> str:
        """Return a mark as Lark has it: a special token by its name, other text in quotes."""
        token = tokenizer.get_vocab().get(text)
        if token is not None and is_special(token):
            return text
        return json.dumps(text)

    opening = mark(tokenizer.tool_call_start)
    closing = mark(tokenizer.tool_call_end)
    bodies = " | ".join(f"body_{i}" for i in range(len(tools)))
    rules = [f"call: ({bodies}) {closing}", r"TEXT: /(.|\n)*/"]
    for i, tool in enumerate(tools):
        name = json.dumps(tool.function.name, ensure_ascii=False)
        before = json.dumps(f'\n{{"name": {name}, "arguments": ', ensure_ascii=False)
        rules.append(f"body_{i}: {before} %json {json.dumps(_arguments(tool))} " + r'"}\n"')

    thoughts = []
    if tokenizer.has_thinking:
        thoughts = [mark(text) for text in (tokenizer.think_start, tokenizer.think_end)]
    if must_call:
        thought = ""
        if state == "reasoning":
            thought = "thought "
            rules += _up_to("thought", "TEXT", thoughts[1], r'"\n"*')
        start = f'start: {thought}{opening} call ("\\n" {opening} call)*'
    else:
        start = "start: called* text"
        special = [each for each in thoughts if not each.startswith('"')]
        rules.append(f"text: {' | '.join(['TEXT', *(f'TEXT {each} text' for each in special)])}")
        rules += _up_to("called", "text", opening, "call")

    return "\n".join(["%llguidance {}", start, *rules])


def _up_to(rule: str, text: str, mark: str, then: str) -> list[str]:
    """Return a rule for a text up to the first mark, and what follows it."""
    if mark.startswith('"'):
        return [f"{rule}_mark[lazy]: TEXT {mark}", f"{rule}: {rule}_mark {then}"]
    return [f"{rule}: {text} {mark} {then}"]


def _arguments(tool: Tool) -> dict[str, Any]:
    """Return the schema of a function's arguments: any object where it is not strict."""
    schema: dict[str, Any] = {"type": "object"}
    if tool.function.strict and tool.function.parameters is not None:
        schema = tool.function.parameters
    return {**schema, "x-guidance": _LAYOUT}
