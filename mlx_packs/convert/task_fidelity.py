"""Merge fidelity of what embeds or reranks: by its vectors, or by its scores.

Logits say nothing of either: an embedder has none, and a reranker reads two of them, or a head of
its own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import mlx.nn as nn
import numpy as np

from ..adapters.score_head import score_head
from ..adapters.spec import SCORE_WEIGHT
from ..data.formats import TOKEN_FORMATS, format_of
from ..data.pair_formats import PAIR_FORMATS
from ..data.ranking_formats import RANKING_FORMATS, RankingFormat
from ..errors import PackError
from ..evaluation.rows import evaluation_rows
from ..memory.matmul_path import generation_path
from ..objectives.rerank import rerank_rows, scorer_of
from ..packs.base import Base, activated, load_base_for
from ..packs.compatibility import text_limit
from ..packs.manifest import has_score_head
from .fidelity import (
    ANGLE_NOISE,
    KL_NOISE,
    LARGEST_ANGLE,
    MAX_KL,
    TEXTS_AT_ONCE,
    Outcome,
    angle_between,
    dense_modules,
    drift_limit,
    finer_settings,
    first_that_passes,
    replaced,
    texts_of,
)
from .merge_plan import Change, MergeRequest, plan_changes

_DOCUMENTS = 8  # of a query, of rows that have no rankings
_AT_ONCE = 8  # documents


@dataclass(frozen=True)
class _Measure:
    # Computes what is compared with the modules that a base has, and with a head.
    results: Callable[[nn.Linear | None], np.ndarray]
    distance: Callable[[np.ndarray, np.ndarray], float]
    largest: float  # limit of a distance
    noise: float  # distance by rounding itself


def compare_vectors(request: MergeRequest) -> Outcome:
    """Return the mean of 1 - cosine of embeddings, and the cheapest setting within the limit."""
    texts = texts_of(request)
    base = load_base_for(request.pack, request.model, request.trust_remote_code)
    longest = text_limit(request.pack.manifest, base.config)

    def vectors(_: nn.Linear | None) -> np.ndarray:
        return base.embedder.encode(texts, TEXTS_AT_ONCE, longest)

    measure = _Measure(vectors, angle_between, LARGEST_ANGLE, ANGLE_NOISE)
    with request.display.working("drift", f"{len(texts)} texts"):
        return _compared(request, base, measure, {"texts": len(texts)})


def compare_scores(request: MergeRequest) -> Outcome:
    """Return the mean divergence of the scores, and the cheapest setting within the limit.

    Of each document it is the KL divergence of relevant against not, with the probability that the
    sigmoid of its score is, in nats.
    """
    base = load_base_for(request.pack, request.model, request.trust_remote_code)
    instruction = request.pack._part("objective").get("instruction")
    limit = text_limit(request.pack.manifest, base.config)
    rows = [
        tokens
        for query, documents in _queries(request)
        for tokens in rerank_rows(base, query, documents, instruction, limit)
    ]

    def scores(head: nn.Linear | None) -> np.ndarray:
        return scorer_of(base, head).of_rows(rows, _AT_ONCE).astype(np.float64)

    measure = _Measure(scores, score_divergence, MAX_KL, KL_NOISE)
    with request.display.working("drift", f"{len(rows)} documents"):
        return _compared(request, base, measure, {"documents": len(rows)})


def score_divergence(one: np.ndarray, other: np.ndarray) -> float:
    """Return the mean KL divergence of two outcomes of scores [N]: sigmoid, and what it leaves."""
    yes = 1 / (1 + np.exp(-one))
    of_yes = np.logaddexp(0, -other) - np.logaddexp(0, -one)  # log p - log q
    of_no = np.logaddexp(0, other) - np.logaddexp(0, one)
    return float(max(0.0, (yes * of_yes + (1 - yes) * of_no).mean()))


def _queries(request: MergeRequest) -> list[tuple[str, list[str]]]:
    """Return queries with documents: of rankings, or of any texts as they follow each other."""
    columns = request.columns
    formats = (*RANKING_FORMATS, *PAIR_FORMATS, *TOKEN_FORMATS)

    queries = []
    others = []

    for row in evaluation_rows(columns, "test", request.rows):
        row_format = format_of(row, columns, formats)
        texts = [text for text in row_format.texts(row, columns) if text.strip()]

        if isinstance(row_format, RankingFormat) and len(texts) > 1:
            queries.append((texts[0], texts[1:]))
        else:
            others += texts

    for start in range(0, len(others) - 1, _DOCUMENTS + 1):
        query, *documents = others[start : start + _DOCUMENTS + 1]
        if documents:
            queries.append((query, documents))

    if not queries:
        raise PackError(f"--data {columns.data}: has no texts to compare on.", "data")
    return queries


def _compared(
    request: MergeRequest, base: Base, measure: _Measure, counts: Mapping[str, int]
) -> Outcome:
    pack = request.pack
    path = generation_path(base.model)
    weight = None
    head = None
    if has_score_head(pack.manifest):
        weight = pack.load_tensors()[SCORE_WEIGHT]
        head = score_head(weight)

    base.model.eval()
    with activated(base, None, path):
        plain = measure.results(head)
    with activated(base, pack, path):
        attached = measure.results(head)

    def distance_of(changes: list[Change]) -> float:
        written = score_head(weight.astype(changes[0].weight.dtype)) if weight is not None else None

        with replaced(base.model, dense_modules(base, changes, pack)):
            return measure.distance(attached, measure.results(written))

    planned = plan_changes(request)
    moved = measure.distance(attached, plain)
    drift = distance_of(planned.changes)

    others = finer_settings(request, planned.changes, distance_of)
    if head is not None:  # which is written dense
        others = {name: each for name, each in others.items() if name.startswith("none")}
    limit = drift_limit(request.max_drift, moved, measure.largest, measure.noise)
    tried, passes = first_that_passes(request.requantize, drift, limit, others)

    scores = {"drift_mean": drift, "drift_of_pack": moved, **counts}
    return Outcome(scores, ("drift_mean",), limit, tried, passes)
