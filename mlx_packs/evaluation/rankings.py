"""Evaluation of a reranker on held-out queries: where the documents that answer come.

The numbers equal sentence-transformers' CrossEncoderRerankingEvaluator; among documents with
equal scores the ones that answer least come first, so that no order of a row is of use.
"""

from collections.abc import Callable, Sequence

import numpy as np

from ..data.dataset import Batch
from ..data.formats import Row
from ..data.rankings import INSTRUCTION, RankingCollate, RerankPrompt, encode_rankings
from ..data.texts import TextGroups
from ..objectives.reader import ranking_reader
from ..objectives.text_loss import TextLoss, infonce_loss
from .scores import Metrics, MetricScore, TextEvaluator, over_batches, standard_error

TOP = 10  # of MRR and NDCG
VALIDATED = ("valid_loss", "valid_mrr_at_10", "valid_ndcg_at_10")


def score_rankings(
    objective: TextLoss,
    batches: Sequence[Batch],
    advance: Callable[[], None] | None = None,
) -> MetricScore:
    """Score all queries of some batches, at least one, in evaluation mode."""
    scores, losses, labels = over_batches(objective.model, batches, objective.outputs, advance)
    is_document = labels >= 0
    places = range(len(labels))
    queries = [(scores[i, is_document[i]], labels[i, is_document[i]]) for i in places]
    metrics: dict[str, float | None] = {}
    for name, metric in (("mrr_at_10", reciprocal_rank), ("ndcg_at_10", ndcg)):
        values = np.array([metric(*query) for query in queries])
        metrics |= {name: float(values.mean()), f"{name}_se": standard_error(values)}
    return MetricScore(float(losses.mean()), metrics, len(queries))


def reciprocal_rank(scores: np.ndarray, labels: np.ndarray) -> float:
    """1 / the place of the first document with a label above 0; 0 beyond the first ten."""
    order = np.lexsort((labels, -scores))
    places = np.flatnonzero(labels[order][:TOP] > 0)
    return 1 / (places[0] + 1) if len(places) else 0.0


def ndcg(scores: np.ndarray, labels: np.ndarray) -> float:
    """Labels, discounted by the logarithm of their place, as a share of the best order's."""
    gains = 1 / np.log2(np.arange(2, min(len(labels), TOP) + 2))
    order = np.lexsort((labels, -scores))

    ideal = (np.sort(labels)[::-1][:TOP] * gains).sum()
    return float((labels[order][:TOP] * gains).sum() / ideal)


class RerankEvaluator(TextEvaluator):
    """The metrics of a reranker."""

    what = "a reranker"
    collate = RankingCollate

    def encoded(self, rows: Sequence[Row]) -> TextGroups:
        instruction = self.settings.trained.get("instruction") or INSTRUCTION
        return encode_rankings(rows, RerankPrompt(self.base.tokenizer, instruction, self.limit))

    def scored(self, advance: Callable[[], None]) -> Metrics:
        head = active.attached.score if (active := self.base.active) is not None else None
        objective = TextLoss(ranking_reader(self.base, head), infonce_loss)
        return score_rankings(objective, self.batches, advance).metrics
