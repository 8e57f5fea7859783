"""Vectors of texts by a decoder, and losses of embeddings, with sentence-transformers' numbers.

A decoder's vector is a state of its last block, pooled as the files of the base say. Attention is
causal: padding on the right changes no state of a text, and none needs a mask
(https://arxiv.org/abs/2506.05176).

A loss takes embeddings [B, D] by column and weights [B] (0 where a row is padding), and gives the
mean loss of the batch times its number of examples, so that batches of one update add up.

Cosine similarity: https://arxiv.org/abs/1908.10084. Ranking by the other examples of a batch:
https://arxiv.org/abs/1705.00652. CoSENT: https://kexue.fm/archives/8847. Triplets:
https://arxiv.org/abs/1703.07737. Gradients by mini-batches: https://arxiv.org/abs/2101.06983
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.nn as nn

from ..bases.encoder import Embedder, Encoder, pooled, unit
from ..bases.files import context_of
from ..bases.geometry import Heads
from ..bases.model import BaseModel
from ..bases.sentence_config import read_sentence_config
from ..config.choices import DISTANCES, LOSSES, registered
from ..config.schema import TrainConfig
from ..data.dataset import Batch, Dataset, Layout
from ..data.pairs import COLUMNS
from ..distributed.group import ALONE, Group, group
from ..errors import PackError
from ..nn.recompute import recomputed
from ..runtime import mx
from .causal_lm import forward
from .objective import Inputs, Objective, arrays_of
from .reader import hidden_states
from .score import Score

_HIDDEN = -1e9  # a logit that takes no part, finite so that its gradient is 0 and not NaN


def cosine_loss(embeddings: Sequence[mx.array], weights: mx.array, scores: mx.array) -> mx.array:
    """Semantics: sum(weights * (cos(a, b) - scores)^2)."""
    return (weights * (cosines(*embeddings) - scores).square()).sum()


def cosent_loss(
    embeddings: Sequence[mx.array], weights: mx.array, scores: mx.array, similarity_scale: float
) -> mx.array:
    """Semantics: B * log(1 + sum of exp(scale * (cos_i - cos_j)) where scores_i < scores_j)."""
    logits = similarity_scale * cosines(*embeddings)
    differences = logits[:, None] - logits[None]
    ordered = (scores[:, None] < scores[None]) & ((weights[:, None] * weights[None]) > 0)

    differences = mx.where(ordered, differences, _HIDDEN).flatten()
    total = mx.logsumexp(mx.concatenate([mx.zeros((1,)), differences]))
    return total * weights.sum()


def ranking_loss(
    embeddings: Sequence[mx.array], weights: mx.array, similarity_scale: float
) -> mx.array:
    """Each anchor's positive among all positives and negatives of the batch.

    Semantics: sum of -log softmax(scale * cos(anchor_i, candidates))[positive_i].
    """
    anchors, *candidates = (unit(column) for column in embeddings)
    # [B, B x candidates of a row]
    logits = similarity_scale * (anchors @ mx.concatenate(candidates).T)

    is_example = mx.concatenate([weights] * len(candidates)) > 0
    positives = mx.diagonal(logits)  # the anchors are the first B columns
    log_sums = mx.logsumexp(mx.where(is_example[None], logits, _HIDDEN), axis=1)
    return (weights * (log_sums - positives)).sum()


def triplet_loss(
    embeddings: Sequence[mx.array],
    weights: mx.array,
    triplet_margin: float,
    triplet_distance: str,
) -> mx.array:
    """Semantics: sum(weights * max(0, d(anchor, positive) - d(anchor, negative) + margin)).

    Of several negatives it is the mean.
    """
    anchor, positive, *negatives = embeddings
    distance = _DISTANCES[triplet_distance]
    near = distance(anchor, positive)
    losses = [mx.maximum(near - distance(anchor, far) + triplet_margin, 0) for far in negatives]
    return (weights * sum(losses)).sum() / len(losses)


def cosines(a: mx.array, b: mx.array) -> mx.array:
    """Of rows, [B]."""
    return (unit(a) * unit(b)).sum(axis=-1)


def _euclidean(a: mx.array, b: mx.array) -> mx.array:
    square = (a - b).square().sum(axis=-1)
    apart = square > 0  # the gradient of a distance of 0 is 0, not NaN
    return mx.where(apart, mx.sqrt(mx.where(apart, square, 1)), 0)


_DISTANCES: dict[str, Callable[[mx.array, mx.array], mx.array]] = registered(
    DISTANCES,
    {
        "euclidean": _euclidean,
        "cosine": lambda a, b: 1 - cosines(a, b),
        "manhattan": lambda a, b: mx.abs(a - b).sum(axis=-1),
    },
)


def embed_in_parts(
    model: Encoder, columns: Sequence[mx.array], lengths: mx.array, size: int
) -> list[mx.array]:
    """Return embeddings of C columns [B, T] with lengths [B, C], ``size`` texts at a time.

    The backward computes each part again. A part waits for the one before it, on the way back too,
    so that the activations of one are in memory at a time. The numbers are those of one pass over
    all.
    """
    turn = mx.zeros(())  # goes from part to part, and its gradient back

    def part(turn: mx.array, tokens: mx.array, lengths: mx.array) -> tuple[mx.array, mx.array]:
        vectors = model(tokens, lengths)
        return vectors, mx.depends([turn], [vectors])[0]

    embeddings = []
    for column, counts in zip(columns, lengths.T, strict=True):
        parts = []
        for start in range(0, len(column), size):
            here = slice(start, start + size)
            vectors, turn = recomputed(part, [model], turn, column[here], counts[here])
            parts.append(vectors)
        embeddings.append(mx.concatenate(parts))
    # nothing is added but the order: `turn` is zero
    embeddings[-1] = embeddings[-1] + turn
    return embeddings


# Each takes embeddings by column, weights, the scores of scored examples, and its settings.
_LOSSES: dict[str, Callable[..., mx.array]] = registered(
    LOSSES,
    {
        "cosine": cosine_loss,
        "cosent": cosent_loss,
        "mnrl": ranking_loss,
        "cached-mnrl": ranking_loss,
        "triplet": triplet_loss,
    },
)


class EmbeddingObjective(Objective):
    """A loss of embeddings by its name in `config.choices.LOSSES`, with its settings.

    ``score`` takes the objective, batches, and the examples whose vectors are scored, if any are;
    an objective that only trains needs none.
    """

    unit = "pairs"

    def __init__(
        self,
        model: Encoder,
        loss: str,
        train: TrainConfig,
        score: Callable[..., Score] | None = None,
    ) -> None:
        self.model = model
        self.compares_examples = LOSSES[loss].compares_all
        self._name = loss
        self._train = train
        self._score = score

    def loss(self, inputs: Inputs, layout: Layout = ()) -> tuple[mx.array, mx.array]:
        """Sum of the loss over the examples, and the number of those that are not padding.

        A loss that compares examples compares the examples of all ranks.
        """
        ranks = group() if self.compares_examples else ALONE
        total, count = self._loss(ranks, inputs)
        return ranks.counted_once(total), ranks.counted_once(count)

    def _loss(self, ranks: Group, inputs: Inputs) -> tuple[mx.array, mx.array]:
        train = self._train
        facts = LOSSES[self._name]
        columns = [inputs[name] for name in COLUMNS if name in inputs]
        lengths = inputs["lengths"]
        if facts.by_parts:
            embeddings = embed_in_parts(self.model, columns, lengths, train.mini_batch_size)
        else:
            embeddings = [self.model(*column) for column in zip(columns, lengths.T, strict=True)]

        settings = {n: getattr(train, n) for n in facts.settings if n != "mini_batch_size"}
        of_pairs = [inputs["weights"]]
        if facts.scored:
            of_pairs.append(inputs["scores"])
        embeddings = [ranks.joined(column) for column in embeddings]
        weights, *scores = (ranks.joined(values) for values in of_pairs)
        return _LOSSES[self._name](embeddings, weights, *scores, **settings), weights.sum()

    def mean_loss(self, batches: Sequence[Batch]) -> float:
        """Return the loss of a pair of some batches, without those of other ranks or gradients."""
        total = sum(self._loss(ALONE, arrays_of(batch))[0].item() for batch in batches)
        return total / sum(batch.targets for batch in batches)

    def score(self, data: Dataset, advance: Callable[[], None] | None = None) -> Score:
        """Score all examples; the loss is the first batch's, which shows an overflow."""
        score = self._score(self, [next(data.batches())], data.examples)
        if advance is not None:
            for _ in range(data.batches_per_epoch()):
                advance()
        return score

    def validate(self, data: Dataset) -> Score:
        return self._score(self, data.once(), data.examples)

    def score_trained(self, batch: Batch) -> Score:
        return self._score(self, [batch])


class DecoderVectors(nn.Module):
    """Computes one vector per text by a decoder, as `bases.encoder.Encoder` does.

    Semantics: pool(states[tokens]) in float32, / its length if ``normalize``.

    Args:
        base: has the settings of pooling in its files.
        decoder: its model with adapters; None is the model itself.
    """

    def __init__(self, base: BaseModel, decoder: nn.Module | None = None) -> None:
        super().__init__()
        self.decoder = decoder or base.model
        states = hidden_states(self.decoder, base.name, "embedding")
        self._states = partial(forward, self.decoder, states)
        self.sentence_config = read_sentence_config(base.path, is_decoder=True)
        self.dims = Heads.of(base.config).hidden  # width of a vector

        # tokens of a text at most
        positions = context_of(base.config)
        self.longest = min(self.sentence_config.max_seq_length or positions, positions)

    def __call__(self, tokens: mx.array, lengths: mx.array | None = None) -> mx.array:
        return pooled(self._states(tokens), lengths, self.sentence_config)


def embedder_of(base: BaseModel) -> Embedder:
    """Return a decoder as it embeds texts."""
    vectors = DecoderVectors(base)

    tokenizer = base.tokenizer._tokenizer
    if vectors.sentence_config.adds_eos:
        tokenizer = with_eos(tokenizer, base.path)
    return Embedder(vectors, tokenizer)


def with_eos(tokenizer: Any, path: Path) -> Any:
    """Return a copy of a fast tokenizer that puts the end token after every text."""
    if tokenizer.eos_token is None:
        raise PackError(
            f"{path}: its tokenizer has no end token (eos_token), whose state is the vector of a "
            "text. Name one in tokenizer_config.json.",
            "unsupported",
        )
    if not getattr(tokenizer, "is_fast", False):
        raise PackError(
            f"{path}: has no fast tokenizer (tokenizer.json), which embeddings need.", "unsupported"
        )
    if tokenizer.encode("a")[-1:] == [tokenizer.eos_token_id]:
        return tokenizer

    from tokenizers.processors import Sequence, TemplateProcessing

    own = copy.deepcopy(tokenizer)
    end = own.eos_token

    template = TemplateProcessing(
        single=f"$A {end}", pair=f"$A $B:1 {end}:1", special_tokens=[(end, own.eos_token_id)]
    )

    backend = own.backend_tokenizer
    steps = [template]
    if backend.post_processor is not None:
        steps.insert(0, backend.post_processor)
    backend.post_processor = Sequence(steps)
    return own
