"""A tokenizer with another chat template than its own: the one of a run or of its pack."""

import copy
import importlib
from types import SimpleNamespace
from typing import Any

from ..config.chat_templates import CHAT_TEMPLATES, MARKS, PLAIN
from ..errors import PackError
from .chat_template import check_syntax
from .turns import stop_at_answer_end, unnamed_ends


def with_template(tokenizer: Any, text: str | None) -> Any:
    """Return a tokenizer whose chat template is ``text``; None leaves it as it is."""
    if text is None:
        return tokenizer

    templated = tokenizer.__dict__.setdefault("_templated", {})
    if text not in templated:
        templated[text] = _with_template(tokenizer, text)
    return templated[text]


def adds_bos(tokenizer: Any) -> bool:
    """Whether a tokenizer begins a text with BOS."""
    if (adds := getattr(tokenizer, "_adds_bos", None)) is None:
        bos = tokenizer.bos_token_id
        adds = tokenizer._adds_bos = bos is not None and tokenizer.encode("a")[:1] == [bos]
    return adds


def tool_parser_of(tokenizer: Any, template: str | None) -> str | None:
    """Return the name of mlx-lm's parser for the calls that a template writes."""
    from mlx_lm import tokenizer_utils

    infer = getattr(tokenizer_utils, "_infer_tool_parser", None)
    if infer is None or template is None:
        return None
    return infer(SimpleNamespace(chat_template=template, get_vocab=tokenizer.get_vocab))


def _with_template(tokenizer: Any, text: str) -> Any:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    _check_marks(tokenizer, text)
    check_syntax(text, "--chat-template")

    own = tokenizer._tokenizer
    plain = copy.copy(own)
    plain.chat_template = text

    if text == PLAIN and adds_bos(tokenizer):
        plain.chat_template = "{{- bos_token }}" + text

    tools = {}
    if parser := tool_parser_of(own, text):
        module = importlib.import_module(f"mlx_lm.tool_parsers.{parser}")
        tools = {
            "tool_parser": module.parse_tool_call,
            "tool_call_start": module.tool_call_start,
            "tool_call_end": module.tool_call_end,
        }

    ends = tokenizer.eos_token_ids - set(unnamed_ends(tokenizer))
    templated = TokenizerWrapper(plain, lambda _: tokenizer.detokenizer, ends, **tools)
    templated._images = getattr(tokenizer, "_images", None)
    templated._template_name = "--chat-template"

    stop_at_answer_end(templated)
    return templated


def _check_marks(tokenizer: Any, text: str) -> None:
    """Raise a PackError if a named template marks turns with what is no token of the base."""
    vocabulary = tokenizer.get_vocab()
    usable = [
        name
        for name, template in CHAT_TEMPLATES.items()
        if all(mark in vocabulary for mark in MARKS.get(template, ()))
    ]

    for name, template in CHAT_TEMPLATES.items():
        if text == template and name not in usable:
            raise PackError(
                f"--chat-template {name}: {MARKS[template][0]} is no token of the base model. Name "
                f"one of {', '.join(usable)}, or a .jinja file.",
                "unsupported",
                "chat_template",
            )
