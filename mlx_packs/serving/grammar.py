"""Answers and tool calls of a given schema: what may follow is left, everything else is masked.

Of tool calls only those that are JSON between marks have a grammar, as mlx-lm's parser
``json_tools`` reads them: ``<tool_call>``, a line with ``{"name": ..., "arguments": {...}}``,
``</tool_call>``. The grammar is llguidance's (https://github.com/guidance-ai/llguidance), which
knows the tokens of a Hugging Face tokenizer and gives a bit for each of them.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..errors import PackError, library_errors
from ..runtime import mx
from .protocol import Tool

# What llguidance calls the options of a schema.
_OPTIONS = "x-guidance"
_INDENTATION = "{0,64}"  # levels


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
    layout: Mapping[str, Any],
) -> str:
    """Return the grammar of an answer with calls of some functions.

    Args:
        tokenizer: mlx-lm's wrapper, for which `has_tool_grammar` holds.
        tools: the functions; the arguments of a strict one obey its parameters.
        state: where the answer begins, as `first_state` has it.
        must_call: whether the answer is a call; else calls may stand anywhere in a text.
        is_special: whether a token is special to llguidance, and so no part of a text.
        layout: that of JSON in the rows of the pack, as `schema_in_layout` has it.
    """
    mark = partial(_mark, tokenizer, is_special)
    opening = mark(tokenizer.tool_call_start)
    closing = mark(tokenizer.tool_call_end)
    # Templates write arguments, and other separators than in the answers of the pack.
    layout = {part: layout[part] for part in ("inside", "keys") if part in layout}
    bodies = " | ".join(f"body_{i}" for i in range(len(tools)))
    rules = [f"call: ({bodies}) {closing}", r"TEXT: /(.|\n)*/"]
    for i, tool in enumerate(tools):
        name = json.dumps(tool.function.name, ensure_ascii=False)
        before = json.dumps(f'\n{{"name": {name}, "arguments": ', ensure_ascii=False)
        rules.append(f"body_{i}: {before} %json {json.dumps(_arguments(tool, layout))} " + r'"}\n"')

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

    return "\n".join([start, *rules])


def json_after_thoughts(
    tokenizer: Any, schema: Mapping[str, Any], state: str, is_special: Callable[[int], bool]
) -> str:
    """Return the grammar of thoughts, which may be open in the ``state``, and JSON after them."""
    mark = partial(_mark, tokenizer, is_special)
    rules = _up_to("thought", "TEXT", mark(tokenizer.think_end), r'"\n"*')
    thoughts = f"({mark(tokenizer.think_start)} thought)?" if state != "reasoning" else "thought"
    start = f"start: {thoughts} %json {json.dumps(schema)}"
    return "\n".join([start, r"TEXT: /(.|\n)*/", *rules])


def _mark(tokenizer: Any, is_special: Callable[[int], bool], text: str) -> str:
    """Return a mark as Lark has it: a special token by its name, other text in quotes."""
    token = tokenizer.get_vocab().get(text)
    if token is not None and is_special(token):
        return text
    return json.dumps(text)


def _up_to(rule: str, text: str, mark: str, then: str) -> list[str]:
    """Return a rule for a text up to the first mark, and what follows it."""
    if mark.startswith('"'):
        return [f"{rule}_mark[lazy]: TEXT {mark}", f"{rule}: {rule}_mark {then}"]
    return [f"{rule}: {text} {mark} {then}"]


def _arguments(tool: Tool, layout: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a function's arguments: any object where it is not strict."""
    schema: dict[str, Any] = {"type": "object"}
    if tool.function.strict and tool.function.parameters is not None:
        schema = tool.function.parameters
    return schema_in_layout(schema, layout)


def schema_in_layout(schema: dict[str, Any], layout: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema whose JSON has a layout, as `manifest.json_layout_of` has it.

    If it is unknown, single spaces are optional. Free white space could go on without end.
    """
    options: dict[str, Any] = {
        "item_separator": layout.get("item_separator", ", ?"),
        "key_separator": layout.get("key_separator", ": ?"),
        "whitespace_flexible": "inside" in layout,
        "json_allow_general_unicode_escapes": True,
    }
    if "inside" in layout:
        space, line, indentation = layout["inside"].rpartition("\n")
        options["whitespace_pattern"] = indentation
        if line:
            options["item_separator"] = ", ?"  # short lists may have one line
            options["whitespace_pattern"] = f"{space}\n({indentation}){_INDENTATION}"

    return {**_in_order(schema, layout.get("keys", ())), _OPTIONS: options}


def _in_order(schema: Any, keys: Sequence[str]) -> Any:
    """Return a schema whose properties have the order of the pack's rows; others come last."""
    if isinstance(schema, list):
        return [_in_order(each, keys) for each in schema]
    if not isinstance(schema, dict):
        return schema

    ordered = {name: _in_order(value, keys) for name, value in schema.items()}
    properties = ordered.get("properties")
    if keys and isinstance(properties, dict):
        known = [key for key in keys if key in properties]
        ordered["properties"] = {**dict.fromkeys(known), **properties}
    return ordered


class Grammars:
    """Makes the processors that hold answers to a schema; one for a base.

    Args:
        tokenizer: mlx-lm's wrapper of a fast tokenizer.
        vocab_size: of the base's logits, which may be more than the tokenizer has.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._tokens: Any = None

    def check(self, schema: dict, layout: Mapping[str, Any], state: str = "normal") -> str:
        """Return the grammar of a JSON schema, or raise a PackError if llguidance cannot use it.

        ``layout`` is as of `schema_in_layout`, and ``state`` as of `first_state`.
        """
        schema = schema_in_layout(schema, layout)
        lark = f"start: %json {json.dumps(schema)}"
        if state == "reasoning" or layout.get("thoughts"):
            is_special = self._known().is_special_token
            lark = json_after_thoughts(self._tokenizer, schema, state, is_special)
        return self._checked(lark, "response_format", "the schema")

    def check_tools(
        self, tools: Sequence[Tool], state: str, must_call: bool, layout: Mapping[str, Any]
    ) -> str:
        """Return the grammar of an answer with tool calls, as `tool_grammar` has it."""
        for tool in tools:
            if tool.function.strict and tool.function.parameters is not None:
                schema = _arguments(tool, layout)
                self._checked(f"start: %json {json.dumps(schema)}", "tools", "a schema")

        is_special = self._known().is_special_token
        lark = tool_grammar(self._tokenizer, tools, state, must_call, is_special, layout)
        return self._checked(lark, "tools", "a schema")

    def _checked(self, lark: str, field: str, what: str) -> str:
        """Return a grammar that an answer can obey; errors name the ``field`` of the request."""
        from llguidance import LLMatcher

        def to_error(reason: str) -> PackError:
            return PackError(f"{field}: {what} cannot be used: {reason}.", flag=field)

        with library_errors(to_error):
            grammar = LLMatcher.grammar_from_lark(f"%llguidance {{}}\n{lark}")
            fault = LLMatcher.validate_grammar(grammar, self._known())
        if not fault:  # that no answer obeys it, the first mask alone says
            matcher = LLMatcher(self._known(), grammar)
            matcher.compute_logit_bias()
            fault = matcher.get_error()

        if fault:
            reason = fault.splitlines()[0].rpartition("failed to compile JSON schema: ")[2]
            raise to_error(reason.rstrip("."))
        return grammar

    def processor(self, grammar: str, prompt_tokens: int) -> Callable[..., mx.array]:
        """Return what masks the scores of one answer, after a prompt of so many tokens."""
        from llguidance import LLMatcher

        matcher = LLMatcher(self._known(), grammar)
        taken = 0

        def mask(tokens: mx.array, logits: mx.array) -> mx.array:
            nonlocal taken
            answer = tokens[prompt_tokens + taken :].tolist()
            if answer and not matcher.is_stopped():
                matcher.consume_tokens(answer)
            taken += len(answer)

            bits = np.frombuffer(matcher.compute_logit_bias(), dtype=np.uint8)
            if matcher.is_error():
                reason = matcher.get_error().splitlines()[0].rstrip(".")
                raise PackError(f"The answer cannot continue as its schema requires: {reason}.")

            allowed = mx.array(bits[: logits.shape[-1]] != 0)
            return mx.where(allowed, logits, -mx.inf)

        return mask

    def _known(self) -> Any:
        """Return the tokenizer as llguidance has it; it is made once."""
        if self._tokens is None:
            from llguidance import LLTokenizer

            fast = self._tokenizer._tokenizer
            backend = getattr(fast, "backend_tokenizer", None)
            if backend is None:
                raise PackError(
                    "response_format, tools: this base's tokenizer is not a fast one, which JSON "
                    "and strict or required calls need.",
                    "unsupported",
                    "response_format",
                )

            eos = sorted(self._tokenizer.eos_token_ids)
            self._tokens = LLTokenizer(backend.to_str(), n_vocab=self._vocab_size, eos_token=eos)
        return self._tokens
