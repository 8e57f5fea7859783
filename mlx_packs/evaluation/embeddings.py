"""Evaluation of embeddings on held-out examples: correlation with scores, retrieval, triplets.

The numbers equal sentence-transformers' EmbeddingSimilarityEvaluator,
InformationRetrievalEvaluator and TripletEvaluator with the cosine.
"""

from collections.abc import Sequence

import numpy as np

from ..bases.encoder import Vectors, embedded
from ..data.formats import Row
from ..data.pairs import encode_pairs
from ..data.texts import TextGroups
from ..errors import PackError
from ..packs.base import Base
from .rows import EvalSettings
from .scores import MetricReport, Metrics, check_no_text_settings

TOP = 10  # of MRR and NDCG
_QUERIES = 512  # whose similarities are in memory at a time


VALIDATED = (
    "valid_loss",
    "valid_spearman",
    "valid_pearson",
    "valid_mrr_at_10",
    "valid_ndcg_at_10",
    "valid_recall_at_1",
    "valid_triplet_accuracy",
)


def check_scores(pairs: TextGroups, where: str) -> None:
    """Raise a PackError where the scores of examples do not vary: nothing correlates then."""
    if pairs.labels is not None and len(np.unique(pairs.labels)) < 2:
        raise PackError(
            f"{where}: all {len(pairs)} held-out examples have the same score. A "
            "correlation needs different ones (valid.jsonl).",
            "data",
        )


def score_pairs(model: Vectors, pairs: TextGroups, batch_size: int) -> Metrics:
    """Return the metrics that the examples allow. The model must be in evaluation mode.

    Semantics: correlations of the cosine with the score; or retrieval of each anchor's positives
    among all positives; with negatives also how often the positive is nearer.
    """
    tokens, at = pairs.distinct()  # [N, C] into vectors
    vectors = embedded(model, tokens, batch_size)
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)

    if pairs.labels is not None:
        cosines = (vectors[at[:, 0]] * vectors[at[:, 1]]).sum(axis=1)
        return {
            "spearman": spearman(cosines, pairs.labels),
            "pearson": pearson(cosines, pairs.labels),
        }

    metrics = retrieval(vectors, at[:, 0], at[:, 1])
    if pairs.format.has_negatives:
        anchor, positive, *negatives = (vectors[column] for column in at.T)
        right = (anchor * positive).sum(axis=1)
        nearer = [right > (anchor * negative).sum(axis=1) for negative in negatives]
        return {"triplet_accuracy": float(np.mean(nearer)), **metrics}
    return metrics


def validated_entries(pairs: TextGroups) -> list[str]:
    if pairs.labels is not None:
        names = ["spearman", "pearson"]
    else:
        names = ["mrr_at_10", "ndcg_at_10", "recall_at_1"]
        if pairs.format.has_negatives:
            names.append("triplet_accuracy")
    return ["valid_loss", *(f"valid_{name}" for name in names)]


def pearson(a: np.ndarray, b: np.ndarray) -> float:
    """Correlation of two [N]; 0 where one of them does not vary."""
    a, b = (x.astype(np.float64) - x.mean(dtype=np.float64) for x in (a, b))
    norm = float(np.sqrt((a * a).sum() * (b * b).sum()))
    if not norm > 0:
        return 0.0
    return float((a * b).sum()) / norm


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Correlation of the ranks of two [N]; equal values share the mean of their ranks."""
    return pearson(_ranks(a), _ranks(b))


def _ranks(x: np.ndarray) -> np.ndarray:
    _, place, counts = np.unique(x, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[place]


def retrieval(vectors: np.ndarray, anchors: np.ndarray, positives: np.ndarray) -> Metrics:
    """MRR@10, NDCG@10 and recall@1 of each anchor's positives among all positives.

    An anchor that occurs in several examples has several positives. ``vectors`` [M, D] have length
    1; ``anchors`` and ``positives`` are int [N] into them.
    """
    queries = np.unique(anchors)
    documents = np.unique(positives)
    right: dict[int, set[int]] = {}
    for anchor, positive in zip(anchors.tolist(), positives.tolist(), strict=True):
        right.setdefault(anchor, set()).add(positive)

    gains = 1 / np.log2(np.arange(2, TOP + 2))
    reciprocal: list[float] = []
    discounted: list[float] = []
    recall: list[float] = []
    for start in range(0, len(queries), _QUERIES):
        chosen = queries[start : start + _QUERIES]
        cosines = vectors[chosen] @ vectors[documents].T
        ranked = documents[np.argsort(-cosines, axis=1, kind="stable")[:, :TOP]]
        for query, best in zip(chosen.tolist(), ranked, strict=True):
            hits = np.array([document in right[query] for document in best.tolist()])
            places = np.flatnonzero(hits)
            reciprocal.append(1 / (places[0] + 1) if len(places) else 0.0)
            ideal = gains[: min(len(right[query]), TOP)].sum()
            discounted.append(gains[: len(hits)][hits].sum() / ideal)
            recall.append(float(hits[0]) / len(right[query]))

    return {
        "mrr_at_10": float(np.mean(reciprocal)),
        "ndcg_at_10": float(np.mean(discounted)),
        "recall_at_1": float(np.mean(recall)),
    }


class EmbeddingEvaluator:
    """The metrics of a base's embeddings; see `evaluate.Evaluator`."""

    def __init__(self, base: Base, rows: Sequence[Row], settings: EvalSettings) -> None:
        check_no_text_settings(settings, f"the embeddings of {base.name}")
        if base.architecture == "encoder" and settings.matmul_path not in ("auto", "dense"):
            text = f"--matmul-path: does not apply to {base.name}, which is dense. Leave it out."
            raise PackError(text, "conflict", "matmul_path")

        self.matmul_path = "quantized"  # an encoder is dense: nothing to choose
        if base.architecture == "decoder" and settings.matmul_path != "auto":
            self.matmul_path = settings.matmul_path

        embedder = base.embedder
        longest = min(settings.max_seq_length, embedder.vectors.longest)
        self._vectors = embedder.vectors
        self._batch_size = settings.batch_size
        self._display = settings.display

        query_prompt = settings.trained.get("query_prompt") or ""
        self._pairs = encode_pairs(rows, embedder.tokenizer, longest, query_prompt=query_prompt)
        check_scores(self._pairs, str(settings.columns.data))

    def score(self) -> Metrics:
        with self._display.working("score", f"{len(self._pairs):,} rows"):
            return score_pairs(self._vectors, self._pairs, self._batch_size)

    def report(self, base: Metrics, pack: Metrics | None) -> MetricReport:
        return MetricReport(self._pairs, base, pack)
