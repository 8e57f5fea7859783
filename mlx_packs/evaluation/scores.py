"""Scores and reports of tasks whose results are metrics by name, rather than a perplexity.

The standard error of a metric is the metric ``<name>_se``; it is None for a single example.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import mlx.nn as nn
import numpy as np

from ..config.choices import METRICS
from ..config.data import NO_METRIC
from ..data.dataset import Batch
from ..data.formats import Row
from ..data.texts import TextCollate, TextGroups, texts_once
from ..distributed.group import group
from ..errors import PackError, flag_of
from ..memory.matmul_path import choose_matmul_path
from ..objectives.score import Score
from ..packs.base import Base
from ..packs.facts import format_commonest
from ..report.text import TextReport
from ..terminal import with_error
from .rows import EvalSettings

Metrics = Mapping[str, float | None]

_COMMONEST = "commonest_share"
_LABELS = {name: number.label for name, number in METRICS.items()} | {"accuracy": "accuracy"}


@dataclass(frozen=True)
class MetricScore(Score):
    """The loss of held-out examples, and their metrics."""

    loss: float  # mean of an example
    metrics: Metrics  # of a line of metrics.jsonl, with standard errors
    rows: int = 0
    # What reports have in place of the metrics, and `commonest_share`.
    facts: Metrics = field(default_factory=dict)

    def to_json(self) -> dict[str, float | None]:
        return {"loss": self.loss, "rows": self.rows, **self.metrics, **self.facts}

    @classmethod
    def from_json(cls, values: Mapping) -> "MetricScore":
        """Return a score for the reports of phases, whose facts are among the metrics too."""
        metrics = {name: value for name, value in values.items() if name not in ("loss", "rows")}
        return cls(values["loss"], metrics, values["rows"], metrics)

    @property
    def value(self) -> float:
        return self.loss

    @property
    def entries(self) -> dict[str, float]:
        metrics = {f"valid_{n}": v for n, v in self.metrics.items() if not n.endswith("_se")}
        return {"valid_loss": self.loss, **metrics}

    @property
    def text(self) -> str:
        metrics = format_with_errors(self.metrics)
        text = ", ".join(filter(None, (f"loss {self.loss:.3f}", metrics)))
        return f"{text}{format_commonest(self.facts)}"

    @property
    def reported(self) -> Metrics:
        numbers = {name: value for name, value in self.facts.items() if name != _COMMONEST}
        return numbers or self.metrics

    @property
    def described(self) -> Mapping[str, float]:
        commonest = {name: value for name, value in self.facts.items() if name == _COMMONEST}
        return {"rows": self.rows, **commonest}

    @property
    def perplexity(self) -> dict[str, float | None] | None:
        if "chosen_ppl" not in self.facts:
            return None
        accuracy = self.metrics["preference_accuracy"]
        return {"ppl": self.facts["chosen_ppl"], "ppl_se": None, "accuracy": accuracy}


def over_batches(
    model: nn.Module,
    batches: Sequence[Batch],
    compute: Callable[[Batch], Sequence],
    advance: Callable[[], None] | None = None,
) -> list[np.ndarray]:
    """Return each of the arrays that ``compute`` gives for batches, of all batches together.

    The model is in evaluation mode, and ranks share the batches; there must be at least one.
    """
    if not batches:
        raise PackError("--data: there are no examples to evaluate.", "data")
    model.eval()

    def computed(batch: Batch) -> list[np.ndarray]:
        arrays = [np.asarray(values) for values in compute(batch)]
        if advance is not None:
            advance()
        return arrays

    parts = zip(*group().map(computed, batches), strict=True)
    return [np.concatenate(part) for part in parts]


def standard_error(values: np.ndarray) -> float | None:
    """Return the standard error of a mean, [N]; None of a single value."""
    if len(values) < 2:
        return None
    return float(values.std(ddof=1) / np.sqrt(len(values)))


def format_with_errors(metrics: Metrics) -> str:
    """Return metrics for people: ``MRR@10 0.8123 ± 0.0210, NDCG@10 ...``."""
    texts = []
    for name, value in metrics.items():
        if name in _LABELS:
            shown = with_error(value, metrics.get(f"{name}_se"), ".4f")
            texts.append(f"{_LABELS[name]} {shown}")
    return ", ".join(texts)


@dataclass(frozen=True, repr=False)
class MetricReport(TextReport):
    """Metrics of a base, and of the base with a pack, on the same examples.

    A base has none if they need the head of the pack. ``facts`` are others of the JSON, ``notes``
    lines for people.
    """

    examples: TextGroups
    base: Metrics | None
    pack: Metrics | None
    facts: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def rows(self) -> int:
        return self.examples.count

    @property
    def format(self) -> str:
        return self.examples.format.name

    def to_json(self) -> dict[str, Any]:
        """Return the report as a mapping, as `packs eval --json` prints it."""
        counts = {"rows": self.rows, "dropped": self.examples.dropped, "cut": self.examples.cut}
        metrics = {"base": self.base, "pack": self.pack}
        return {**counts, "format": self.format, **metrics, **self.facts}

    def lines(self) -> list[str]:
        shown = {
            name: format_with_errors(metrics)
            for name, metrics in (("base", self.base), ("pack", self.pack))
            if metrics is not None
        }
        if (loss := self.facts.get("loss")) is not None:
            shown["pack"] += f", loss {loss:.4f}"
        if self.pack is not None:
            shown["pack"] += format_commonest({**self.pack, **self.facts})

        examples = self.examples
        data = f"data    {self.rows} examples ({self.format})"
        if examples.dropped:
            data += f" · {examples.dropped} dropped for their length"
        if examples.cut:
            data += f" · {examples.cut} texts cut to --max-seq-length"
        return [*(f"{name}    {text}" for name, text in shown.items()), *self.notes, data]


def check_no_text_settings(settings: EvalSettings, what: str) -> None:
    """Raise a PackError if a setting is about text, which a pack of another kind has not."""
    misplaced = {
        "loss_on": settings.loss_on is not None,
        "metric": settings.metric not in (None, NO_METRIC) or settings.own_metric is not None,
        "share_prefix": settings.share_prefix == "on",
    }
    for name, is_misplaced in misplaced.items():
        if is_misplaced:
            text = f"{flag_of(name)}: does not apply to {what}. Leave it out."
            raise PackError(text, "conflict", name)


def scoring_path(base: Base, batches: Sequence[Batch], matmul_path: str) -> str:
    """Return how the weights of a base are used on batches; ``auto`` is the fastest way."""
    if matmul_path != "auto":
        return matmul_path
    tokens = batches[-1].inputs["tokens"].size
    return choose_matmul_path(base.model, tokens, steps=len(batches)).matmul_path


class TextEvaluator(ABC):
    """The metrics of numbers that are read of texts; see `evaluate.Evaluator`."""

    what: ClassVar[str]  # is evaluated, in messages
    collate: ClassVar[type[TextCollate]] = TextCollate

    def __init__(self, base: Base, rows: Sequence[Row], settings: EvalSettings) -> None:
        check_no_text_settings(settings, self.what)
        self.base = base
        self.settings = settings
        self.limit = min(settings.max_seq_length, base.text_limit)
        self.examples = self.encoded(rows)

        collate = self.collate(settings.batch_size, self.limit)
        data = texts_once(self.examples, collate, np.arange(len(self.examples)))
        self.batches = data.once()
        self.matmul_path = scoring_path(base, self.batches, settings.matmul_path)

    @abstractmethod
    def encoded(self, rows: Sequence[Row]) -> TextGroups:
        """Return the examples of rows."""

    def score(self) -> Any:
        with self.settings.display.task("score", len(self.batches), "batches") as bar:
            return self.scored(bar.advance)

    @abstractmethod
    def scored(self, advance: Callable[[], None]) -> Any:
        """Score the batches by the base as it is now; ``advance`` is called after each."""

    def report(self, base: Any, pack: Any) -> MetricReport:
        """Return the report of two scores, which are metrics by name; other scores override it."""
        return MetricReport(self.examples, base, pack)
