"""Merge fidelity of what embeds or reranks: by its vectors, or by its scores.

Logits say nothing of either: an embedder has none, and a reranker reads two of them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from ..config.choices import MATMUL_PATHS
from ..data.formats import TOKEN_FORMATS, RowFormat, format_of
from ..data.task_formats import PAIR_FORMATS, RANKING_FORMATS, RankingFormat
from ..errors import PackError
from ..evaluation.rows import evaluation_rows
from ..memory.matmul_path import generation_path
from ..objectives.reader import ranking_reader, rerank_rows
from ..packs.base import Base, activated
from ..packs.compatibility import text_limit
from .fidelity import (
    KL_NOISE,
    MAX_KL,
    Outcome,
    drift_limit,
    finer_settings,
    first_that_passes,
    load_for_comparison,
    merged_modules,
    replaced,
)
from .merge_plan import MergeRequest

_LARGEST_ANGLE = 1e-3  # limit of 1 - cosine
_ANGLE_NOISE = 1e-6  # of 1 - cosine, by rounding itself
_TEXTS_AT_ONCE = 32
_DOCUMENTS_AT_ONCE = 8
_DOCUMENTS = 8  # of a query, of rows that have no rankings

Distance = Callable[[np.ndarray, np.ndarray], float]


def compare_vectors(request: MergeRequest) -> Outcome:
    """Return the mean of 1 - cosine of embeddings, and the cheapest setting within the limit."""
    formats = (*PAIR_FORMATS, *RANKING_FORMATS, *TOKEN_FORMATS)
    texts = [text for _, row_texts in _texts(request, formats) for text in row_texts if text]
    if not texts:
        raise PackError(f"--data {request.columns.data}: has no text to compare on.", "data")
    base = load_for_comparison(request.pack, request.model, request.trust_remote_code)
    longest = text_limit(request.pack.manifest, base.config)

    def vectors() -> np.ndarray:
        return base.embedder.encode(texts, _TEXTS_AT_ONCE, longest)

    counts = {"texts": len(texts)}
    with request.display.working("drift", f"{len(texts)} texts"):
        return _compared(
            request, base, vectors, angle_between, counts, _LARGEST_ANGLE, _ANGLE_NOISE
        )


def compare_scores(request: MergeRequest) -> Outcome:
    """Return the mean divergence of the scores, and the cheapest setting within the limit.

    Of each document it is the KL divergence of relevant against not, with the probability that the
    sigmoid of its score is, in nats.
    """
    base = load_for_comparison(request.pack, request.model, request.trust_remote_code)
    instruction = request.pack._part("objective").get("instruction")
    limit = text_limit(request.pack.manifest, base.config)
    rows = [
        tokens
        for query, documents in _queries(request)
        for tokens in rerank_rows(base, query, documents, instruction, limit)
    ]

    def scores() -> np.ndarray:
        return ranking_reader(base, None).of_rows(rows, _DOCUMENTS_AT_ONCE).astype(np.float64)

    with request.display.working("drift", f"{len(rows)} documents"):
        return _compared(request, base, scores, score_divergence, {"documents": len(rows)})


def angle_between(one: np.ndarray, other: np.ndarray) -> float:
    """Return the mean of 1 - cosine of rows."""
    one, other = (x.astype(np.float64) for x in (one, other))
    norms = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    cosines = (one * other).sum(axis=1) / np.maximum(norms, 1e-24)
    return float(max(0.0, 1 - cosines.mean()))


def score_divergence(one: np.ndarray, other: np.ndarray) -> float:
    """Return the mean KL divergence of two outcomes of scores [N]: sigmoid, and what it leaves."""
    yes = 1 / (1 + np.exp(-one))
    of_yes = np.logaddexp(0, -other) - np.logaddexp(0, -one)  # log p - log q
    of_no = np.logaddexp(0, other) - np.logaddexp(0, one)
    return float(max(0.0, (yes * of_yes + (1 - yes) * of_no).mean()))


def _queries(request: MergeRequest) -> list[tuple[str, list[str]]]:
    """Return queries with documents: of rankings, or of any texts as they follow each other."""
    formats = (*RANKING_FORMATS, *PAIR_FORMATS, *TOKEN_FORMATS)
    queries = []
    others = []
    for is_ranking, row_texts in _texts(request, formats):
        texts = [text for text in row_texts if text.strip()]
        if is_ranking and len(texts) > 1:
            queries.append((texts[0], texts[1:]))
        else:
            others += texts

    for start in range(0, len(others) - 1, _DOCUMENTS + 1):
        query, *documents = others[start : start + _DOCUMENTS + 1]
        if documents:
            queries.append((query, documents))

    if not queries:
        raise PackError(f"--data {request.columns.data}: has no texts to compare on.", "data")
    return queries


def _texts(request: MergeRequest, formats: Sequence[RowFormat]) -> Iterator[tuple[bool, list[str]]]:
    """Yield whether an example is a ranking, and its texts, by the first format that it has."""
    columns = request.columns
    for row in evaluation_rows(columns, "test", request.rows):
        row_format = format_of(row, columns, formats)
        yield isinstance(row_format, RankingFormat), row_format.texts(row, columns)


def _compared(
    request: MergeRequest,
    base: Base,
    results: Callable[[], np.ndarray],
    distance: Distance,
    counts: Mapping[str, int],
    largest: float = MAX_KL,
    noise: float = KL_NOISE,
) -> Outcome:
    """Compare results of the modules that a base has: attached, merged, and without the pack."""
    pack = request.pack
    path = generation_path(base.model)
    if MATMUL_PATHS[path].keeps_dense:
        path = "transient"
    base.model.eval()
    with activated(base, None, path):
        plain = results()
    with activated(base, pack, path):
        attached = results()

    def distance_of(request: MergeRequest) -> float:
        with replaced(base.model, merged_modules(base, request)):
            return distance(attached, results())

    moved = distance(attached, plain)
    drift = distance_of(request)
    limit = drift_limit(request.max_drift, moved, largest, noise)
    others = finer_settings(request, distance_of)
    tried, passes = first_that_passes(request.requantize, drift, limit, others)

    scores = {"drift_mean": drift, "drift_of_pack": moved, **counts}
    return Outcome(scores, ("drift_mean",), limit, tried, passes)
