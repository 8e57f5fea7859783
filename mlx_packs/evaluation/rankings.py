"""Evaluation of a reranker on held-out queries: where the documents that answer come.

The numbers are those of sentence-transformers' CrossEncoderRerankingEvaluator; of documents with
equal scores those that answer least come first, so that no order of a row is of use.
"""

from collections.abc import Sequence

import numpy as np

from ..config.choices import TASKS
from ..data.formats import Row
from ..data.rankings import INSTRUCTION, RerankPrompt, encode_rankings
from ..data.texts import TextGroups
from ..objectives.reader import Reader
from ..objectives.rerank import scorer_of
from ..packs.base import Base
from .rows import EvalSettings
from .scores import MetricReport, Metrics, check_no_text_settings, standard_error

TOP = 10  # of MRR and NDCG
VALIDATED = ("valid_loss", "valid_mrr_at_10", "valid_ndcg_at_10")


def score_rankings(
    scorer: Reader,
    rankings: TextGroups,
    batch_size: int,
) -> Metrics:
    """Return metrics and their standard errors. The model must be in evaluation mode."""
    tokens, at = rankings.distinct()
    scores = scorer.of_rows(tokens, batch_size)[at]
    queries = [
        (scores[i, :size], rankings.labels[i, :size]) for i, size in enumerate(rankings.sizes)
    ]
    metrics: dict[str, float | None] = {}
    for name, metric in (("mrr_at_10", reciprocal_rank), ("ndcg_at_10", ndcg)):
        values = np.array([metric(*query) for query in queries])
        metrics |= {name: float(values.mean()), f"{name}_se": standard_error(values)}
    return metrics


def reciprocal_rank(scores: np.ndarray, labels: np.ndarray) -> float:
    """1 / the place of the first document with a label above 0; 0 beyond the first ten."""
    order = np.lexsort((labels, -scores))
    places = np.flatnonzero(labels[order][:TOP] > 0)
    return 1 / (places[0] + 1) if len(places) else 0.0


def ndcg(scores: np.ndarray, labels: np.ndarray) -> float:
    """Labels, discounted by the logarithm of their place, of those of the best order."""
    gains = 1 / np.log2(np.arange(2, min(len(labels), TOP) + 2))
    order = np.lexsort((labels, -scores))

    ideal = (np.sort(labels)[::-1][:TOP] * gains).sum()
    return float((labels[order][:TOP] * gains).sum() / ideal)


class RerankEvaluator:
    """The metrics of a reranker; see `evaluate.Evaluator`."""

    def __init__(self, base: Base, rows: Sequence[Row], settings: EvalSettings) -> None:
        check_no_text_settings(settings, "a reranker")
        self.matmul_path = settings.matmul_path
        if self.matmul_path == "auto":
            self.matmul_path = "quantized"

        instruction = settings.trained.get("instruction") or INSTRUCTION
        limit = min(settings.max_seq_length, base.text_limit)
        prompt = RerankPrompt(base.tokenizer, instruction, limit)
        self._base = base
        self._display = settings.display
        self._documents = settings.batch_size * TASKS["rerank"].sequences
        self._rankings = encode_rankings(rows, prompt)

    def score(self) -> Metrics:
        head = active.attached.score if (active := self._base.active) is not None else None
        scorer = scorer_of(self._base, head)
        with self._display.working("score", f"{len(self._rankings):,} queries"):
            return score_rankings(scorer, self._rankings, self._documents)

    def report(self, base: Metrics | None, pack: Metrics | None) -> MetricReport:
        return MetricReport.of(len(self._rankings), self._rankings.format.name, base, pack)
