"""Whether a prompt ends inside the thoughts of an answer: its template has opened them."""

from collections.abc import Sequence
from typing import Any

_TAIL = 64  # tokens at the end of a prompt, more than any mark and the white space after it


def opens_thoughts(tokenizer: Any, prompt: Sequence[int]) -> bool:
    """Return whether what follows a prompt begins in the thoughts.

    Only the end of the prompt counts: the mark that opens thoughts, and white space. A mark before
    that is a text of the conversation: of a question, a tool, or an earlier answer.
    """
    if not tokenizer.has_thinking:
        return False
    end = tokenizer.decode(list(prompt[-_TAIL:]))
    return end.rstrip().endswith(tokenizer.think_start)
