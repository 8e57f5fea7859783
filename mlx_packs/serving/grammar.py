"""Answers in JSON of a given schema: what may follow is left, everything else is masked.

The grammar is llguidance's (https://github.com/guidance-ai/llguidance), which knows the tokens of a
Hugging Face tokenizer and gives a bit for each of them.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from ..errors import PackError, library_errors
from ..runtime import mx
from .fields import field_error

# What llguidance calls the options of a schema.
_OPTIONS = "x-guidance"
_INDENTATION = "{0,64}"  # levels


def json_after_thoughts(
    tokenizer: Any, schema: Mapping[str, Any], state: str, is_special: Callable[[int], bool]
) -> str:
    """Return the grammar of thoughts, which may be open in the ``state``, and JSON after them."""
    start = _mark(tokenizer, is_special, tokenizer.think_start)
    end = _mark(tokenizer, is_special, tokenizer.think_end)
    thoughts = f"({start} thought)?" if state != "reasoning" else "thought"
    rules = [f"start: {thoughts} %json {json.dumps(schema)}", r"TEXT: /(.|\n)*/"]
    if end.startswith('"'):  # up to the first one
        rules += [f"thought_mark[lazy]: TEXT {end}", r'thought: thought_mark "\n"*']
    else:
        rules.append(rf'thought: TEXT {end} "\n"*')
    return "\n".join(rules)


def _mark(tokenizer: Any, is_special: Callable[[int], bool], text: str) -> str:
    """Return a mark as Lark has it: a special token by its name, other text in quotes."""
    token = tokenizer.get_vocab().get(text)
    if token is not None and is_special(token):
        return text
    return json.dumps(text)


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

    def check(self, schema: dict, layout: Mapping[str, Any], state: str = "normal") -> str:
        """Return the grammar of a JSON schema, or raise a PackError if llguidance cannot use it.

        ``layout`` is as of `schema_in_layout`, and ``state`` as of `first_state`.
        """
        schema = schema_in_layout(schema, layout)
        lark = f"start: %json {json.dumps(schema)}"
        if state == "reasoning" or layout.get("thoughts"):
            is_special = self._tokens.is_special_token
            lark = json_after_thoughts(self._tokenizer, schema, state, is_special)

        with library_errors(_unusable):
            grammar = LLMatcher.grammar_from_lark(f"%llguidance {{}}\n{lark}")
            fault = LLMatcher.validate_grammar(grammar, self._tokens)
        if not fault:  # that no answer obeys it, the first mask alone says
            matcher = LLMatcher(self._tokens, grammar)
            matcher.compute_logit_bias()
            fault = matcher.get_error()

        if fault:
            reason = fault.splitlines()[0].rpartition("failed to compile JSON schema: ")[2]
            raise _unusable(reason.rstrip("."))
        return grammar

    def processor(self, grammar: str, prompt_tokens: int) -> Callable[..., mx.array]:
        """Return what masks the scores of one answer, after a prompt of so many tokens."""
        matcher = LLMatcher(self._tokens, grammar)
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

    @cached_property
    def _tokens(self) -> Any:
        """The tokenizer as llguidance has it."""
        fast = self._tokenizer._tokenizer
        backend = getattr(fast, "backend_tokenizer", None)
        if backend is None:
            text = "this base's tokenizer is not a fast one, which JSON needs."
            raise field_error("response_format", text, "unsupported")
        eos = sorted(self._tokenizer.eos_token_ids)
        return LLTokenizer(backend.to_str(), n_vocab=self._vocab_size, eos_token=eos)


def _unusable(reason: str) -> PackError:
    return field_error("response_format", f"the schema cannot be used: {reason}.")
