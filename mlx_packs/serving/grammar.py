"""Answers that are JSON of a given schema: what may follow is left, everything else is masked.

The grammar is llguidance's (https://github.com/guidance-ai/llguidance), which knows the tokens of a
Hugging Face tokenizer and gives a bit for each of them.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..errors import PackError, library_errors
from ..runtime import mx
from .protocol import Tool
from .tool_grammar import tool_grammar

ANY_OBJECT = {"type": "object"}


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

    def check(self, schema: dict) -> str:
        """Return the grammar of a JSON schema, or raise a PackError if llguidance cannot use it."""
        return self._of_schema(schema, _unusable)

    def _of_schema(self, schema: dict, to_error: Callable[[str], PackError]) -> str:
        from llguidance import LLMatcher

        # Without free white space, of which a weak model may never see the end.
        options = {"whitespace_flexible": False}
        with library_errors(to_error):
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=options)
        return self._checked(grammar, to_error)

    def check_tools(self, tools: Sequence[Tool], state: str, must_call: bool) -> str:
        """Return the grammar of an answer with tool calls, as `tool_grammar` has it."""
        from llguidance import LLMatcher

        for tool in tools:
            if tool.function.strict and tool.function.parameters is not None:
                self._of_schema(tool.function.parameters, _unusable_tools)

        is_special = self._known().is_special_token
        lark = tool_grammar(self._tokenizer, tools, state, must_call, is_special)
        with library_errors(_unusable_tools):
            grammar = LLMatcher.grammar_from_lark(lark)
        return self._checked(grammar, _unusable_tools)

    def _checked(self, grammar: str, to_error: Callable[[str], PackError]) -> str:
        """Return a grammar that an answer can obey."""
        from llguidance import LLMatcher

        with library_errors(to_error):
            fault = LLMatcher.validate_grammar(grammar, self._known())
        if not fault:  # that no answer obeys it, the first mask alone says
            matcher = LLMatcher(self._known(), grammar)
            matcher.compute_logit_bias()
            fault = matcher.get_error()

        if fault:
            raise to_error(fault.splitlines()[0].rstrip("."))
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


def _unusable_tools(reason: str) -> PackError:
    return PackError(f"tools: a schema cannot be used: {reason}.", flag="tools")


def _unusable(reason: str) -> PackError:
    message = f"response_format: the schema cannot be used: {reason}."
    return PackError(message, flag="response_format")
