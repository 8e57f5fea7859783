"""Losses of embeddings, with sentence-transformers' numbers.

Each takes embeddings [B, D] by column and weights [B] (0 where a row is padding), and gives the
mean loss of the batch times its number of rows, so that batches of one update add up.

Cosine similarity: https://arxiv.org/abs/1908.10084. Ranking by the other rows of a batch:
https://arxiv.org/abs/1705.00652. CoSENT: https://kexue.fm/archives/8847. Triplets:
https://arxiv.org/abs/1703.07737. Gradients by mini-batches: https://arxiv.org/abs/2101.06983
"""

import math
from collections.abc import Callable, Sequence

from ..bases.encoder import Encoder, unit
from ..config.choices import DISTANCES, LOSSES, registered
from ..config.schema import TrainConfig
from ..data.pairs import PairBatch
from ..nn.recompute import recomputed
from ..runtime import mx
from .objective import Arrays, Objective, Score

_HIDDEN = -1e9  # a logit that takes no part, finite so that its gradient is 0 and not NaN


def cosine_loss(embeddings: Sequence[mx.array], weights: mx.array, scores: mx.array) -> mx.array:
    """Semantics: sum(weights * (cos(a, b) - scores)^2)."""
    return (weights * (cosines(*embeddings) - scores).square()).sum()


def cosent_loss(
    embeddings: Sequence[mx.array], weights: mx.array, scores: mx.array, scale: float
) -> mx.array:
    """Semantics: B * log(1 + sum of exp(scale * (cos_i - cos_j)) where scores_i < scores_j)."""
    logits = scale * cosines(*embeddings)
    differences = logits[:, None] - logits[None]
    ordered = (scores[:, None] < scores[None]) & ((weights[:, None] * weights[None]) > 0)
    differences = mx.where(ordered, differences, _HIDDEN).flatten()
    total = mx.logsumexp(mx.concatenate([mx.zeros((1,)), differences]))
    return total * weights.sum()


def ranking_loss(embeddings: Sequence[mx.array], weights: mx.array, scale: float) -> mx.array:
    """Each anchor's positive among all positives and negatives of the batch.

    Semantics: sum of -log softmax(scale * cos(anchor_i, candidates))[positive_i].
    """
    anchors, *candidates = (unit(column) for column in embeddings)
    logits = scale * (anchors @ mx.concatenate(candidates).T)  # [B, B x candidates of a row]
    there = mx.concatenate([weights] * len(candidates)) > 0
    right = mx.diagonal(logits)  # its positive is the first B columns' own
    log_sums = mx.logsumexp(mx.where(there[None], logits, _HIDDEN), axis=1)
    return (weights * (log_sums - right)).sum()


def triplet_loss(
    embeddings: Sequence[mx.array], weights: mx.array, margin: float, distance: str
) -> mx.array:
    """Semantics: sum(weights * max(0, d(anchor, positive) - d(anchor, negative) + margin))."""
    anchor, positive, negative = embeddings
    far = _DISTANCES[distance]
    return (weights * mx.maximum(far(anchor, positive) - far(anchor, negative) + margin, 0)).sum()


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
    """Embeddings of columns, ``size`` texts at a time; the backward computes each part again.

    A part waits for the one before it, on the way back too, so that the activations of one are in
    memory at a time. The numbers are those of one pass over all.

    Args:
        model: the encoder.
        columns: int [B, T] each.
        lengths: [C, B].
        size: texts of a part.
    """
    turn = mx.zeros(())  # goes from part to part, and its gradient back

    def part(turn: mx.array, tokens: mx.array, lengths: mx.array) -> tuple[mx.array, mx.array]:
        vectors = model(tokens, lengths)
        return vectors, mx.depends([turn], [vectors])[0]

    embeddings = []
    for column, counts in zip(columns, lengths, strict=True):
        parts = []
        for start in range(0, len(column), size):
            here = slice(start, start + size)
            vectors, turn = recomputed(part, [model], turn, column[here], counts[here])
            parts.append(vectors)
        embeddings.append(mx.concatenate(parts))
    # nothing is added but the order: `turn` is zero
    embeddings[-1] = embeddings[-1] + turn
    return embeddings


def _ranking(
    embeddings: Sequence[mx.array], weights: mx.array, scores: mx.array | None, train: TrainConfig
) -> mx.array:
    return ranking_loss(embeddings, weights, train.similarity_scale)


# Each takes embeddings by column, weights, scores (None where the rows have none) and settings.
_LOSSES: dict[str, Callable[..., mx.array]] = registered(
    LOSSES,
    {
        "cosine": lambda embeddings, weights, scores, train: cosine_loss(
            embeddings, weights, scores
        ),
        "cosent": lambda embeddings, weights, scores, train: cosent_loss(
            embeddings, weights, scores, train.similarity_scale
        ),
        "mnrl": _ranking,
        "cached-mnrl": _ranking,
        "triplet": lambda embeddings, weights, scores, train: triplet_loss(
            embeddings, weights, train.triplet_margin, train.triplet_distance
        ),
    },
)


class EmbeddingObjective(Objective):
    """A loss of embeddings by name, with its settings.

    Args:
        model: the encoder.
        loss: one of `config.choices.LOSSES`.
        train: the settings of the loss.
        score: scores batches (`evaluation` has scorers); an objective that only trains needs none.
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
        self._name, self._train, self._score = loss, train, score

    def arrays(self, batch: PairBatch) -> Arrays:
        """Return the first two columns, lengths, weights, then scores or a third column."""
        first, second, *others = (mx.array(column) for column in batch.columns)
        scores = [] if batch.scores is None else [mx.array(batch.scores)]
        return (first, second, mx.array(batch.lengths), mx.array(batch.weights), *scores, *others)

    def loss(
        self,
        first: mx.array,
        second: mx.array,
        lengths: mx.array,
        weights: mx.array,
        *rest: mx.array,
    ) -> tuple[mx.array, mx.array]:
        """Sum of the loss over the rows, and the number of rows that are not padding."""
        return self._sum([first, second], lengths, weights, rest), weights.sum()

    def _sum(
        self, columns: list[mx.array], lengths: mx.array, weights: mx.array, rest: Arrays
    ) -> mx.array:
        train, facts = self._train, LOSSES[self._name]
        columns = columns if facts.scored else [*columns, *rest]
        if facts.by_parts:
            embeddings = embed_in_parts(self.model, columns, lengths, train.mini_batch_size)
        else:
            embeddings = [self.model(*column) for column in zip(columns, lengths, strict=True)]
        scores = rest[0] if facts.scored else None
        return _LOSSES[self._name](embeddings, weights, scores, train)

    def mean_loss(self, batches: Sequence[PairBatch]) -> float:
        """Loss per row of some batches, without gradients; nan of none."""
        total = sum(self.loss(*self.arrays(batch))[0].item() for batch in batches)
        count = sum(batch.count for batch in batches)
        return total / count if count else math.nan

    def score(
        self, batches: Sequence[PairBatch], advance: Callable[[], None] | None = None
    ) -> Score:
        """Loss and metrics on batches."""
        return self._score(self, batches, advance)
