"""Evaluation of a reranker on held-out queries: where the documents that answer come.

The numbers are those of sentence-transformers' CrossEncoderRerankingEvaluator; of documents with
equal scores those that answer least come first, so that no order of a row is of use.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import numpy as np

from ..config.choices import TASKS
from ..data.formats import Row
from ..data.rankings import INSTRUCTION, Rankings, RerankPrompt, encode_rankings
from ..errors import PackError, flag_of
from ..objectives.rerank import Scorer, scorer_of
from ..objectives.score import Score
from ..packs.base import Base
from ..packs.pack import Pack
from .metrics import NO_METRIC
from .rows import EvalSettings

TOP = 10  # of MRR and NDCG
_NAMES = {"mrr_at_10": f"MRR@{TOP}", "ndcg_at_10": f"NDCG@{TOP}"}

Metrics = dict[str, float]


@dataclass(frozen=True)
class RankScore(Score):
    """Validation queries in the loop: the loss, if requested, and the metrics with their errors."""

    nll: float
    metrics: Metrics
    errors: dict[str, float | None] = field(default_factory=dict)
    numbers: ClassVar = ("valid_loss", "valid_mrr_at_10", "valid_ndcg_at_10")

    @property
    def value(self) -> float:
        return self.nll

    @property
    def entries(self) -> dict[str, float]:
        return {"valid_loss": self.nll, **{f"valid_{k}": v for k, v in self.metrics.items()}}

    @property
    def text(self) -> str:
        return f"loss {self.nll:.3f}, {shown(self.metrics, self.errors)}"

    def to_json(self, when: str) -> dict[str, float | None]:
        """Return the entries of a report before or after a run."""
        errors = {f"{name}_{when}_se": error for name, error in self.errors.items()}
        return {f"{name}_{when}": value for name, value in self.metrics.items()} | errors


def shown(metrics: Metrics, errors: dict[str, float | None]) -> str:
    """Return metrics for people: ``MRR@10 0.8123 ± 0.0210, NDCG@10 ...``."""
    texts = []
    for name, value in metrics.items():
        text = f"{_NAMES[name]} {value:.4f}"
        if errors.get(name) is not None:
            text += f" ± {errors[name]:.4f}"

        texts.append(text)
    return ", ".join(texts)


def score_rankings(
    scorer: Scorer,
    rankings: Rankings,
    batch_size: int,
    advance: Callable[[int], None] | None = None,
) -> tuple[Metrics, dict[str, float | None]]:
    """Return metrics and their standard errors. The model must be in evaluation mode."""
    rows = [tokens for documents in rankings.tokens for tokens in documents]
    scores = np.split(scorer.of_rows(rows, batch_size), np.cumsum(rankings.documents)[:-1])
    of_queries = [
        (reciprocal_rank(own, labels), ndcg(own, labels))
        for own, labels in zip(scores, rankings.labels, strict=True)
    ]

    values = dict(zip(_NAMES, np.array(of_queries).T, strict=True))
    errors = {
        name: float(each.std(ddof=1) / np.sqrt(len(each))) if len(each) > 1 else None
        for name, each in values.items()
    }
    return {name: float(each.mean()) for name, each in values.items()}, errors


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


@dataclass(frozen=True)
class RerankReport:
    """Base and base with pack on the same queries; a base has no score by a head of the pack."""

    rows: int
    format: str
    base: Metrics | None
    base_se: dict[str, float | None] | None
    pack: Metrics | None
    pack_se: dict[str, float | None] | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        lines = []
        if self.base is not None:
            lines.append(f"base    {shown(self.base, self.base_se or {})}")
        if self.pack is not None:
            lines.append(f"pack    {shown(self.pack, self.pack_se or {})}")
        return [*lines, f"data    {self.rows} queries ({self.format})"]


class RerankEvaluator:
    """The metrics of a reranker; see `evaluate.Evaluator`."""

    def __init__(self, base: Base, rows: Sequence[Row], settings: EvalSettings) -> None:
        unfit = {
            "metric": settings.metric not in (None, NO_METRIC),
            "share_prefix": settings.share_prefix == "on",
            "loss_on": settings.loss_on is not None,
        }
        for name, is_unfit in unfit.items():
            if is_unfit:
                text = f"{flag_of(name)}: means nothing for a reranker. Leave it out."
                raise PackError(text, "conflict", name)

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

    def score(self) -> tuple[Metrics, dict[str, float | None]]:
        head = None
        if (active := self._base.active) is not None:
            head = active.attached.score
        scorer = scorer_of(self._base, head)
        with self._display.working("score", f"{len(self._rankings):,} queries"):
            return score_rankings(scorer, self._rankings, self._documents)

    def report(self, base: Any | None, pack: Any | None) -> RerankReport:
        base, base_se = base or (None, None)
        pack, pack_se = pack or (None, None)
        return RerankReport(
            len(self._rankings), self._rankings.format, base, base_se, pack, pack_se
        )


def evaluate_new_head(
    base: Base, pack: Pack, rows: Sequence[Row], settings: EvalSettings
) -> RerankReport:
    """Return the report of a pack with a head of its own, which the base has no score without."""
    evaluator = RerankEvaluator(base, rows, settings)
    with base.applied(pack, evaluator.matmul_path):
        return evaluator.report(None, evaluator.score())
