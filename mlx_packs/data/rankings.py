"""Queries and documents as the tokens that a reranker reads, and batches of them.

The text of each is Qwen3-Reranker's, in the chat template of the base.

Qwen3-Reranker: https://arxiv.org/abs/2506.05176
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..bases.tokenizer import beginning, tokenizer_errors
from ..errors import PackError
from .dataset import Shape
from .formats import Row
from .task_formats import RANKING_FORMATS, RankingFormat
from .texts import Group, TextCollate, TextGroups, encode_groups

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
_USER = "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
_PLACE = "\u241f"  # of the user's text, in a rendered template


class RerankPrompt:
    """The text by which a decoder is asked whether a document answers a query.

    Args:
        tokenizer: of the base. Without a chat template the question is plain text.
        instruction: what makes a document relevant.
        limit: most tokens; of a longer text the end of the document is cut.
    """

    def __init__(self, tokenizer: Any, instruction: str, limit: int) -> None:
        self._tokenizer = tokenizer
        self._instruction = instruction
        self._limit = limit
        self._before, self._after = _template(tokenizer)
        self._end = self._tokens(self._after)

    def tokens(self, query: str, document: str) -> tuple[np.ndarray, bool]:
        """Return the tokens, int32 [L], and whether the document was cut."""
        return self.encoded(self.text(query, document))

    def text(self, query: str, document: str) -> str:
        """Return the whole text, of a long query or document what can be read at most."""
        query = beginning(query, self._limit)
        document = beginning(document, self._limit)
        user = _USER.format(instruction=self._instruction, query=query, document=document)
        return self._before + user + self._after

    def encoded(self, text: str) -> tuple[np.ndarray, bool]:
        """Return the tokens of a `text`, int32 [L], and whether it was cut before its end."""
        tokens = self._tokens(text)
        is_cut = len(tokens) > self._limit

        if is_cut:
            tokens = tokens[: max(1, self._limit - len(self._end))] + self._end
        return np.array(tokens[-self._limit :], np.int32), is_cut

    def check_query(self, query: str) -> None:
        """Raise a PackError for a query that leaves no room for a document."""
        tokens, is_cut = self.tokens(query, "")
        if is_cut or len(tokens) == self._limit:
            raise PackError(
                f"query: leaves no room for a document, which is read with it in {self._limit} "
                "tokens. Shorten it.",
                flag="query",
            )

    def _tokens(self, text: str) -> list[int]:
        with tokenizer_errors(self._tokenizer):
            return self._tokenizer.encode(text, add_special_tokens=False)


def _template(tokenizer: Any) -> tuple[str, str]:
    """Return what is before and after the question in a conversation."""
    if getattr(tokenizer, "chat_template", None) is None:
        return f"{_SYSTEM}\n\n", "\n<Answer>:"

    system = {"role": "system", "content": _SYSTEM}
    user = {"role": "user", "content": _PLACE}
    joined = {"role": "user", "content": f"{_SYSTEM}\n\n{_PLACE}"}
    for messages in ([system, user], [joined]):
        try:
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
            )
        except Exception:  # a template without a system message raises what it likes
            continue

        if text.count(_PLACE) == 1 and _SYSTEM in text:
            before, _, after = text.partition(_PLACE)
            return before, after

    raise PackError(
        "--task rerank: the chat template of this base renders no question of a user.",
        "unsupported",
    )


def question_parts(tokenizer: Any, instruction: str) -> tuple[str, str, str]:
    """Return what is before the query, between it and the document, and after that."""
    before, after = _template(tokenizer)
    user = _USER.format(instruction=instruction, query=_PLACE, document=_PLACE)
    first, between, last = user.split(_PLACE)
    return before + first, between, last + after


def answer_tokens(tokenizer: Any) -> tuple[int, int]:
    """Return the tokens that stand for yes and no: those that an answer begins with."""
    yes, no = (tokenizer.encode(word, add_special_tokens=False)[:1] for word in ("yes", "no"))
    if not yes or not no or yes == no:
        raise PackError(
            "--task rerank: this base's tokenizer starts 'yes' and 'no' with the same token, so "
            "their logits say nothing. Train another base.",
            "unsupported",
        )
    return yes[0], no[0]


def encode_rankings(
    rows: Sequence[Row], prompt: RerankPrompt, on_bad_row: str = "stop"
) -> TextGroups:
    """Return the queries of a split: of each document the text with its query, and its label."""

    def groups_of(row: Row, row_format: RankingFormat) -> list[Group]:
        query, documents, labels = row_format.usable(row)
        return [([prompt.text(query, document) for document in documents], labels)]

    def encoding(texts: Sequence[str]) -> Iterator[tuple[np.ndarray, bool]]:
        return map(prompt.encoded, texts)

    return encode_groups(rows, RANKING_FORMATS, on_bad_row, groups_of, encoding)


class RankingCollate(TextCollate):
    """Lays out B queries of D documents; ``labels`` are -1 where there is no document."""

    def shapes(self, rankings: TextGroups, orders: Iterator[Sequence[int]]) -> set[Shape]:
        """A shape is the tokens of the longest document, and the documents of a query."""
        lengths = rankings.lengths
        sizes = rankings.sizes
        return {
            (self.width(int(lengths[list(order)].max())), int(sizes[list(order)].max()))
            for order in orders
        }
