"""Thoughts that come before an answer, between the marks of a model."""

from collections.abc import Sequence
from typing import Any

from .tokenizer import readable_text

_TAIL = 64  # tokens at the end of a prompt, more than any mark and the white space after it


def thought_marks(tokenizer: Any) -> tuple[str, str]:
    """Return what opens and what ends thoughts, by default as most models write them."""
    if getattr(tokenizer, "has_thinking", False):
        return tokenizer.think_start, tokenizer.think_end
    return "<think>", "</think>"


def opens_thoughts(tokenizer: Any, prompt: Sequence[int]) -> bool:
    """Return whether what follows a prompt begins in the thoughts.

    Only the end of the prompt counts: the mark that opens thoughts, and white space. A mark before
    that is a text of the conversation: of a question, a tool, or an earlier answer. ``prompt`` is
    as of `render_chat` with ``add_generation_prompt``.
    """
    opening, _ = thought_marks(tokenizer)
    return readable_text(tokenizer, prompt[-_TAIL:]).rstrip().endswith(opening)


def split_thoughts(tokenizer: Any, text: str, is_open: bool = False) -> tuple[str, str]:
    """Return the thoughts and the answer of a text; the answer is empty if thoughts do not end.

    ``is_open``: the text begins in the thoughts, as `opens_thoughts` has it.
    """
    opening, end = thought_marks(tokenizer)
    written = text.lstrip()
    if not is_open and not written.startswith(opening):
        return "", text

    thoughts, _, answer = written.removeprefix(opening).partition(end)
    return thoughts.strip(), answer.strip()
