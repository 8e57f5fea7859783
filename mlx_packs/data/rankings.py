"""Queries and documents as the tokens that a reranker reads, and batches of them.

The text of each is Qwen3-Reranker's, in the chat template of the base.

Qwen3-Reranker: https://arxiv.org/abs/2506.05176
"""

import hashlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..bases.tokenizer import beginning, padded, tokenizer_errors
from ..config.data import DataConfig
from ..errors import PackError
from .bad_rows import BadRows
from .batches import TextCollate
from .dataset import Array, Batch, ExampleSet, Shape
from .formats import Row, check_format, first_format
from .ranking_formats import RANKING_FORMATS, Ranking
from .sources import as_rows, canonical_line

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
_USER = "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
_PLACE = "\u241f"  # of the user's text, in a rendered template
_COLUMNS = DataConfig()  # rankings have names of their own


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
        query = beginning(query, self._limit)
        document = beginning(document, self._limit)
        user = _USER.format(instruction=self._instruction, query=query, document=document)
        tokens = self._tokens(self._before + user + self._after)
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
            "--task rerank: this base's tokenizer begins 'yes' and 'no' with the same token, so "
            "their logits say nothing. Train another base.",
            "unsupported",
        )
    return yes[0], no[0]


@dataclass
class Rankings(ExampleSet):
    """Encoded queries of a split: of each the tokens and labels of its documents."""

    format: str
    tokens: Sequence[Sequence[np.ndarray]]  # [N] queries, of documents int32 [L]
    labels: Sequence[np.ndarray]  # [N] of float32 [documents]
    cut: int  # documents that were too long
    bad: BadRows = field(default_factory=BadRows)  # rows that were left out
    where: Callable[[int], str] = str  # the row of a query, as messages name it
    fingerprint: str | None = None  # of the rows in use

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of the longest document of each query, [N]."""
        return np.array([max(map(len, documents)) for documents in self.tokens])

    @property
    def documents(self) -> np.ndarray:
        """Documents of each query, [N]."""
        return np.array([len(documents) for documents in self.tokens])


def encode_rankings(
    rows: Sequence[Row], prompt: RerankPrompt, on_bad_row: str = "stop"
) -> Rankings:
    """Return the queries of a split."""
    columns = replace(_COLUMNS, on_bad_row=on_bad_row)
    first, row_format = first_format(rows, columns, RANKING_FORMATS)
    rows = row_format.grouped(rows)
    where = as_rows(rows).where
    bad = BadRows(on_bad_row == "stop")
    fingerprint = hashlib.sha256()
    used = array("q")
    tokens = []
    labels = []
    cut = 0

    def read(row: Row) -> Ranking:
        check_format(row, row_format, first.where, _COLUMNS, RANKING_FORMATS)
        return row_format.usable(row)

    for i, row, ranking in bad.usable(rows, read):
        fingerprint.update(canonical_line(row))
        used.append(i)
        encoded = [prompt.tokens(ranking.query, document) for document in ranking.documents]
        cut += sum(is_cut for _, is_cut in encoded)
        tokens.append([each for each, _ in encoded])
        labels.append(np.array(ranking.labels, np.float32))

    return Rankings(
        row_format.name,
        tokens,
        labels,
        cut,
        bad,
        lambda query: where(used[query]),
        fingerprint.hexdigest(),
    )


class RankingCollate(TextCollate):
    """Lays out B queries of D documents; what is missing are documents of one token.

    ``tokens`` int32 [B D, T], ``lengths`` int32 [B D], ``labels`` float32 [B, D], -1 where there is
    no document.
    """

    row_array = "labels"

    def __call__(self, rankings: Rankings, order: Sequence[int]) -> Batch:
        width = max(len(rankings.tokens[i]) for i in order)
        labels = np.full((self.batch_size, width), -1, np.float32)
        texts = [np.zeros(1, np.int32)] * (self.batch_size * width)

        for row, query in enumerate(order):
            documents = rankings.tokens[query]
            texts[row * width : row * width + len(documents)] = documents
            labels[row, : len(documents)] = rankings.labels[query]

        lengths = np.array([len(text) for text in texts], np.int32)
        tokens = padded(texts, self.width(int(lengths.max())))
        inputs = {"tokens": tokens, "lengths": lengths, "labels": labels}
        count = len(order)
        return Batch(inputs, count, count, tuple(int(i) for i in order), rankings)

    def shapes(self, rankings: Rankings, orders: Iterator[Sequence[int]]) -> set[Shape]:
        """A shape is the tokens of the longest document, and the documents of a query."""
        lengths = rankings.lengths
        documents = rankings.documents
        return {
            (self.width(int(lengths[list(order)].max())), int(documents[list(order)].max()))
            for order in orders
        }

    def piece(self, inputs: Mapping[str, Array], start: int, stop: int) -> dict[str, Array]:
        documents = inputs["labels"].shape[1]
        rows = slice(start * documents, stop * documents)
        piece = {name: inputs[name][rows] for name in ("tokens", "lengths")}
        return {**piece, "labels": inputs["labels"][start:stop]}
