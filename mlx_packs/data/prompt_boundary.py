"""The boundary of prompt and answer in tokens: the same in training as in use.

A tokenizer may join the end of a prompt to the beginning of its answer: "ASSISTANT: " and "Yes" are
one text whose token " Yes" is half prompt and half answer. In use the prompt is encoded without its
answer, so it is encoded in the same way here.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from .conversations import Span

_MARK = "\n"  # after it, a part of a text is encoded as one that follows another
Offsets = list[tuple[int, int]]


def split_prompts(
    tokenizer: Any, text: str, spans: Sequence[Span], tokens: list[int], offsets: Offsets | None
) -> tuple[list[int], Offsets | None]:
    """Encode the text before each answer by itself; ``spans`` are the answers in ``text``.

    ``tokens`` are of the whole text, and ``offsets`` their positions, if known.
    """
    edges = sorted({begin for begin, _ in spans if 0 < begin < len(text)})
    if offsets is None or not any(_may_join(text, edge, offsets) for edge in edges):
        return tokens, offsets

    split_tokens: list[int] = []
    split_offsets: Offsets = []
    for begin, end in pairwise([0, *edges, len(text)]):
        piece_tokens, places = _encoded(tokenizer, text[begin:end], follows=begin > 0)
        split_tokens += piece_tokens
        split_offsets += [(start + begin, stop + begin) for start, stop in places]

    return split_tokens, split_offsets


def _may_join(text: str, edge: int, offsets: Offsets) -> bool:
    """Whether a token may span a position, or depend on both sides of it.

    Tokenizers join white space to what follows it; a single line break before a word stays alone.
    """
    i = bisect_left(offsets, (edge, 0))
    if i and offsets[i - 1][1] > edge:
        return True

    before = text[max(0, edge - 2) : edge]
    after = text[edge : edge + 1]
    if not before[-1:].isspace():
        return False
    is_single_break = before[-1:] == "\n" and not before[:-1].isspace() and not after.isspace()
    return not is_single_break


def _encoded(tokenizer: Any, piece: str, follows: bool) -> tuple[list[int], Offsets]:
    """A sentencepiece tokenizer adds a leading space: it is left out of a text that follows."""
    mark = _MARK if follows and _adds_space(tokenizer) else ""
    tokens, places = _plain(tokenizer, mark + piece)
    if not mark:
        return tokens, places

    head = _plain(tokenizer, mark)[0]
    if tokens[: len(head)] != head:
        return _plain(tokenizer, piece)
    return tokens[len(head) :], [(a - len(mark), b - len(mark)) for a, b in places[len(head) :]]


def _adds_space(tokenizer: Any) -> bool:
    """Whether a tokenizer puts a space before a text, as sentencepiece does."""
    head, letter, both = (_plain(tokenizer, text)[0] for text in (_MARK, "a", _MARK + "a"))
    return both[len(head) :] != letter


def _plain(tokenizer: Any, text: str) -> tuple[list[int], Offsets]:
    encoding = tokenizer._tokenizer(
        text,
        add_special_tokens=False,
        return_offsets_mapping=True,
        return_attention_mask=False,
        verbose=False,
    )
    return encoding["input_ids"], encoding["offset_mapping"]
