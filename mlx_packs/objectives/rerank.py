"""Scores of documents for a query by a decoder, and losses of their order.

Each loss takes scores and labels [B, D], label -1 where there is no document, and gives the loss of
each query [B]; a query of padding has none.

Yes and no: https://arxiv.org/abs/2506.05176. RankNet: https://doi.org/10.1145/1102351.1102363.
ListNet: https://doi.org/10.1145/1273496.1273513. InfoNCE: https://arxiv.org/abs/1807.03748
"""

from collections.abc import Callable, Sequence

import mlx.nn as nn
import numpy as np

from ..bases.model import BaseModel
from ..config.choices import RANKING_LOSSES, registered
from ..config.tasks import RerankConfig
from ..data.dataset import Layout
from ..data.rankings import INSTRUCTION, RerankPrompt, answer_tokens
from ..errors import PackError
from ..runtime import mx
from .causal_lm import part_of, split_head
from .objective import Inputs, TextsObjective
from .reader import Reader, head_reader
from .score import Score

_HIDDEN = -1e9  # a logit that takes no part, finite so that its gradient is 0 and not NaN


def scorer_of(base: BaseModel, head: nn.Module | None) -> Reader:
    """Return the scorer of a base with the adapters that it has, and with the head of a pack.

    Semantics: by the LM head logit(yes) - logit(no) after the last token; a head of one row, [D] to
    a number, gives the score itself, as transformers' classifiers have it.
    """
    model = base.model
    if head is not None:
        return head_reader(model, head, base.name, "rerank", lambda scores: scores[:, 0])

    yes, no = answer_tokens(base.tokenizer)
    lm_head = split_head(model)

    def difference(last: mx.array) -> mx.array:
        logits = last if lm_head is None else lm_head.logits(last)
        logits = logits.astype(mx.float32)
        return logits[:, yes] - logits[:, no]

    return Reader(model, part_of(model, lm_head), difference)


def rerank(
    base: BaseModel,
    head: nn.Module | None,
    query: str,
    documents: Sequence[str],
    instruction: str | None,
    batch_size: int,
) -> np.ndarray:
    """Return how likely each document answers a query, float32 [N] in 0 to 1.

    ``head`` is that of the pack on the base; None reads its logits of yes and no.
    """
    if batch_size < 1:
        raise PackError(f"rerank: batch_size must be positive, but got {batch_size}.")
    if isinstance(documents, str) or not len(documents):
        raise PackError("rerank: documents must be a list of texts, with something in it.")

    texts = {"query": query, **{f"documents[{i}]": each for i, each in enumerate(documents)}}
    for name, text in texts.items():
        if not isinstance(text, str) or not text.strip():
            raise PackError(f"rerank: {name} must be a text, but is {text!r:.60}.")

    rows = rerank_rows(base, query, documents, instruction, base.text_limit)
    scores = scorer_of(base, head).of_rows(rows, batch_size)
    return 1 / (1 + np.exp(-scores))


def rerank_rows(
    base: BaseModel, query: str, documents: Sequence[str], instruction: str | None, limit: int
) -> list[np.ndarray]:
    """Return at most ``limit`` tokens by which a base is asked about each document, int32 [L]."""
    prompt = rerank_prompt(base, query, instruction, limit)
    return [prompt.tokens(query, document)[0] for document in documents]


def rerank_prompt(base: BaseModel, query: str, instruction: str | None, limit: int) -> RerankPrompt:
    """Return what makes the tokens of a query with each document; the query is checked."""
    prompt = RerankPrompt(base.tokenizer, instruction or INSTRUCTION, limit)
    prompt.check_query(query)
    return prompt


def infonce_loss(scores: mx.array, labels: mx.array) -> mx.array:
    """Each best document among all that are not.

    Semantics: mean over best p of -log(e^s_p / (e^s_p + sum of e^s_n over the others)).
    """
    best = labels == labels.max(axis=1, keepdims=True)
    others = (labels >= 0) & ~best
    rest = mx.logsumexp(mx.where(others, scores, _HIDDEN), axis=1, keepdims=True)

    losses = mx.logaddexp(scores, rest) - scores
    return mx.where(best, losses, 0).sum(axis=1) / best.sum(axis=1)


def listnet_loss(scores: mx.array, labels: mx.array) -> mx.array:
    """Semantics: -sum of softmax(labels) * log softmax(scores)."""
    is_document = labels >= 0
    shown = mx.where(is_document, scores, _HIDDEN)
    logs = shown - mx.logsumexp(shown, axis=1, keepdims=True)

    expected = mx.softmax(mx.where(is_document, labels, _HIDDEN), axis=1)
    return -mx.where(is_document, expected * logs, 0).sum(axis=1)


def pairwise_loss(
    scores: mx.array, labels: mx.array, of_difference: Callable[[mx.array], mx.array]
) -> mx.array:
    """Semantics: mean of of_difference(s_i - s_j) over the pairs with labels_i > labels_j."""
    ordered = (labels[:, :, None] > labels[:, None]) & (labels[:, None] >= 0)
    losses = of_difference(scores[:, :, None] - scores[:, None])

    count = mx.maximum(ordered.sum(axis=(1, 2)), 1)
    return mx.where(ordered, losses, 0).sum(axis=(1, 2)) / count


# Each takes scores, labels, and the margin that a difference should have.
_LOSSES: dict[str, Callable[[mx.array, mx.array, float], mx.array]] = registered(
    RANKING_LOSSES,
    {
        "infonce": lambda scores, labels, _: infonce_loss(scores, labels),
        "listnet": lambda scores, labels, _: listnet_loss(scores, labels),
        "ranknet": lambda scores, labels, _: pairwise_loss(
            scores, labels, lambda difference: -nn.log_sigmoid(difference)
        ),
        "margin": lambda scores, labels, margin: pairwise_loss(
            scores, labels, lambda difference: mx.maximum(margin - difference, 0)
        ),
    },
)


class Reranking(TextsObjective):
    """A loss of rankings by its name, with its settings.

    ``score`` scores batches; an objective that only trains needs none.
    """

    unit = "queries"

    def __init__(
        self,
        scorer: Reader,
        loss: str,
        train: RerankConfig,
        score: Callable[..., Score] | None = None,
    ) -> None:
        self.model = scorer.model
        self.scorer = scorer
        self._name = loss
        self._train = train
        self._score = score

    def loss(self, inputs: Inputs, layout: Layout = ()) -> tuple[mx.array, mx.array]:
        """Sum of the loss over the queries, and the number of those that are not padding."""
        labels = inputs["labels"]
        tokens = inputs["tokens"].reshape(labels.size, -1)
        last = self.scorer.last(tokens, inputs["lengths"].flatten())
        scores = self.scorer.of_last(last).reshape(labels.shape)

        is_query = labels[:, 0] >= 0
        labels = mx.where(is_query[:, None], labels, 0)
        losses = _LOSSES[self._name](scores, labels, self._train.rank_margin)
        return mx.where(is_query, losses, 0).sum(), is_query.astype(mx.float32).sum()
