"""Numbers that are read at single tokens of texts: by a head of their own, or by the LM head."""

from collections.abc import Callable, Sequence

import mlx.nn as nn
import numpy as np

from ..bases.model import BaseModel
from ..bases.tokenizer import in_batches
from ..data.dataset import Batch
from ..data.labels import ORDINAL
from ..data.rankings import INSTRUCTION, RerankPrompt, answer_tokens
from ..errors import PackError
from ..runtime import mx
from .causal_lm import forward, part_of, split_head
from .objective import arrays_of

States = Callable[..., mx.array]  # tokens [B, T] to final hidden states [B, T, D]


class Reader:
    """Numbers of texts by a decoder.

    ``states`` maps tokens [B, T] to what is read of each, [B, T, D], and ``of_last`` what is read
    at M tokens, [M, D], to their numbers, float32 [M] or [M, K].
    """

    def __init__(
        self, model: nn.Module, states: States, of_last: Callable[[mx.array], mx.array]
    ) -> None:
        self.model = model
        self.states = states
        self.of_last = of_last

    def last(self, tokens: mx.array, lengths: mx.array) -> mx.array:
        """Return what is read of texts [R, T], of which ``lengths`` [R] are no padding, [R, D]."""
        states = forward(self.model, self.states, tokens)
        return mx.take_along_axis(states, (lengths - 1)[:, None, None], axis=1)[:, 0]

    def of_rows(self, rows: Sequence[np.ndarray], batch_size: int) -> np.ndarray:
        """Return the numbers of texts by their tokens, float32 [N] or [N, K]; N is 1 or more."""

        def numbers(tokens: np.ndarray, lengths: np.ndarray) -> mx.array:
            arrays = arrays_of(Batch({"tokens": tokens, "lengths": lengths}, len(tokens), 1))
            return self.of_last(self.last(arrays["tokens"], arrays["lengths"]))

        return in_batches(numbers, rows, batch_size)


def head_reader(
    base: BaseModel, head: nn.Module, task: str, of_head: Callable[[mx.array], mx.array]
) -> Reader:
    """Return what reads the states of a base by a head, as ``of_head`` converts its outputs."""
    states = hidden_states(base.model, base.name, task)
    return Reader(base.model, states, lambda last: of_head(head(last).astype(mx.float32)))


def score_reader(base: BaseModel, head: nn.Module, task: str) -> Reader:
    """Return what reads a score of each text by a head of one row, [M]."""
    return head_reader(base, head, task, lambda scores: scores[:, 0])


def ranking_reader(base: BaseModel, head: nn.Module | None) -> Reader:
    """Return what scores documents for a query, by the head of a pack or by the LM head.

    Semantics: by the LM head logit(yes) - logit(no) after the last token
    (https://arxiv.org/abs/2506.05176); a head of one row, [D] to a number, gives the score itself,
    as transformers' classifiers have it.
    """
    if head is not None:
        return score_reader(base, head, "rerank")

    yes, no = answer_tokens(base.tokenizer)
    lm_head = split_head(base.model)

    def difference(last: mx.array) -> mx.array:
        logits = last if lm_head is None else lm_head.logits(last)
        logits = logits.astype(mx.float32)
        return logits[:, yes] - logits[:, no]

    return Reader(base.model, part_of(base.model, lm_head), difference)


def label_reader(base: BaseModel, head: nn.Module, problem: str) -> Reader:
    """Return what reads the logits of labels by a head, [M, classes]."""
    if problem == ORDINAL:
        return head_reader(base, head, "classify", scale_logits)
    return head_reader(base, head, "classify", lambda logits: logits)


def scale_logits(steps: mx.array) -> mx.array:
    """Return log-probabilities [M, K] of K labels on a scale, float32 [M, K - 1] to float32.

    Semantics: sigmoid(steps[k]) is the probability that the label is above k if it is not below, so
    log p(y = k) = sum over j < k of log sigmoid(steps[j]), and but for the highest label log(1 -
    sigmoid(steps[k])). Probabilities of "above k" cannot rise with k, whatever the head learns.
    """
    above = mx.cumsum(nn.log_sigmoid(steps), axis=-1)
    reached = mx.pad(above, [(0, 0), (1, 0)])
    stays = mx.pad(nn.log_sigmoid(-steps), [(0, 0), (0, 1)])
    return reached + stays


def hidden_states(model: nn.Module, name: str, task: str) -> States:
    """Return the part of a model that computes what a head reads; a PackError if unsure."""
    head = split_head(model)
    if head is None:
        raise PackError(
            f"--task {task}: {name} scales or caps its logits, or names its parts in its own way, "
            "so what a head would read is not known. Train another base.",
            "unsupported",
            "task",
        )
    return head.hidden


def rerank(
    base: BaseModel,
    head: nn.Module | None,
    query: str,
    documents: Sequence[str],
    instruction: str | None,
    batch_size: int,
) -> np.ndarray:
    """Return how likely each document answers a query, float32 [N] in 0 to 1.

    ``head`` is the head of the pack on the base; None reads its logits of yes and no.
    """
    if isinstance(documents, str) or not len(documents):
        raise PackError("rerank: documents must be a list of texts, with something in it.")

    texts = {"query": query, **{f"documents[{i}]": each for i, each in enumerate(documents)}}
    for name, text in texts.items():
        if not isinstance(text, str) or not text.strip():
            raise PackError(f"rerank: {name} must be a text, but is {text!r:.60}.")

    rows = rerank_rows(base, query, documents, instruction, base.text_limit)
    scores = ranking_reader(base, head).of_rows(rows, batch_size)
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
