"""Held-out perplexity and its standard error, token accuracy, and the paired difference of two."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import mlx.nn as nn
import numpy as np

from ..adapters.trainable import compiled
from ..bases.turns import why_no_trees
from ..config.data import metric_of
from ..data.batches import evaluation_batches
from ..data.dataset import Batch, Layout
from ..data.encoding import EncodingOptions, Examples
from ..data.formats import TOKEN_FORMATS, Row, format_of
from ..data.trees import WORTHWHILE, TreePlan
from ..errors import PackError
from ..memory.matmul_path import generation_path
from ..objectives.causal_lm import Head, LossOptions, split_head, target_loss
from ..objectives.exactness import why_length_matters, why_not_shared
from ..objectives.objective import Inputs, arrays_of
from ..objectives.score import Score
from ..packs.base import Base, activated
from ..packs.facts import answer_line
from ..report.facts import format_number
from ..report.text import TextReport
from ..runtime import is_traced, mx
from .answers import AnswerReport, Exam, questions_of
from .images import encode_shown
from .metrics import METRICS
from .rows import EvalSettings
from .scores import over_batches, scoring_path

VALIDATED = ("valid_loss", "valid_ppl", "valid_accuracy")


@dataclass(frozen=True)
class PerplexityScore(Score):
    """PPL is exp(mean NLL a target); its standard error counts examples as independent, not tokens.

    A single example has no error: ``ppl_se`` is None then.
    """

    ppl: float
    ppl_se: float | None
    accuracy: float
    nll: float
    rows: int
    targets: int

    @property
    def value(self) -> float:
        return self.nll

    @property
    def entries(self) -> dict[str, float]:
        return dict(zip(VALIDATED, (self.nll, self.ppl, self.accuracy), strict=True))

    @property
    def text(self) -> str:
        return f"loss {self.value:.3f}, PPL {self.ppl:.2f}"

    @property
    def described(self) -> dict[str, int]:
        return {"rows": self.rows, "targets": self.targets}

    @property
    def perplexity(self) -> dict[str, float | None]:
        return {"ppl": self.ppl, "ppl_se": self.ppl_se, "accuracy": self.accuracy}


@dataclass(frozen=True)
class ExampleScores:
    """Sum of the NLL [R] of each example, its targets [R], and how many of them ranked first [R].

    Examples are in the order of the data, whatever batches they were scored in. ``more`` [R] are
    sums of what a task's scorer adds.
    """

    nll: np.ndarray
    targets: np.ndarray
    hits: np.ndarray
    more: np.ndarray | None = None

    @property
    def score(self) -> PerplexityScore:
        """All examples together.

        Their error is the error of a ratio, since tokens of an example depend on each other:
        se = sqrt(R / (R - 1) * sum((nll_r - mean * n_r)^2)) / N, times PPL.
        """
        count = int(self.targets.sum())
        mean, se = mean_and_error(self.nll, self.targets)
        ppl = perplexity(float(self.nll.sum()), count)
        accuracy = float(self.hits.sum()) / count
        ppl_se = None if se is None else ppl * se
        return PerplexityScore(ppl, ppl_se, accuracy, mean, len(self.nll), count)


@dataclass(frozen=True)
class Difference:
    """NLL a target with a pack less that without, example by example, and its standard error.

    ``ppl_ratio`` is its exponential. Per-example difficulty cancels out, so that the error is far
    smaller than the two perplexities' own. A single example has no error: None then.
    """

    nll: float
    nll_se: float | None
    ppl_ratio: float
    ppl_ratio_se: float | None

    @classmethod
    def between(cls, base: ExampleScores, pack: ExampleScores) -> "Difference":
        mean, se = mean_and_error(pack.nll - base.nll, base.targets)
        ratio = math.exp(min(mean, 700.0))
        ratio_se = None if se is None else ratio * se
        return cls(mean, se, ratio, ratio_se)


def mean_and_error(sums: np.ndarray, targets: np.ndarray) -> tuple[float, float | None]:
    """Mean per target of sums per example, and its standard error with examples as independent."""
    total = int(targets.sum())
    count = len(targets)
    mean = float(sums.sum() / total)
    if count < 2:
        return mean, None
    spread = float(((sums - mean * targets) ** 2).sum())
    return mean, math.sqrt(spread * count / (count - 1)) / total


@dataclass(frozen=True, repr=False)
class EvalReport(TextReport):
    """Scores of a base model, and of the base model with a pack, on the same examples.

    Attributes:
        rows: Number of examples.
        targets: Number of target tokens.
        base: Perplexity and token accuracy of the base model, with standard errors.
        pack: The same with the pack; None without a pack.
        ppl_ratio: Perplexity with the pack divided by the base model's.
        difference: The difference, paired by example, and its standard error; it is far smaller
            than the errors of the two perplexities, since per-example difficulty cancels out.
        answers: Share of right answers, if a metric was requested.
    """

    rows: int
    targets: int
    base: PerplexityScore
    pack: PerplexityScore | None
    ppl_ratio: float | None
    difference: Difference | None = None
    answers: AnswerReport | None = None  # with a metric

    def to_json(self) -> dict[str, Any]:
        """Return the report as a mapping, as `packs eval --json` prints it."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        scores = {"base": self.base, "pack": self.pack}
        lines = [
            f"{name}    PPL {format_number(score.ppl, score.ppl_se, 3)} · "
            f"token accuracy {score.accuracy:.1%}"
            for name, score in scores.items()
            if score is not None
        ]

        if self.difference is not None:
            ratio = format_number(self.difference.ppl_ratio, self.difference.ppl_ratio_se, 3)
            lines.append(
                f"ratio   {ratio}, paired by example, on {self.rows} examples, "
                f"{self.targets:,} target tokens"
            )

        if self.answers is not None:
            lines.append(answer_line(self.answers.to_json()))
        return lines


def perplexity(nll_sum: float, count: int) -> float:
    """Return exp(mean negative log-likelihood), capped where a float64 would overflow."""
    return math.exp(min(nll_sum / count, 700.0))


class Scorer:
    """Scores batches with the model as it is; one trace for each shape of batch.

    Adapters, and trainable base weights, are inputs of the traces: packs that are swapped in place
    (`Base.attach`) are scored by the traces of the first.

    Args:
        model: the base model, with or without adapters.
        head: its head, as `split_head` gives it.
        prepare: adds the states that replace tokens to a batch.

    Attributes:
        traces: number of traces that MLX has compiled.
    """

    def __init__(
        self,
        model: nn.Module,
        head: Head | None,
        prepare: Callable[[Batch], Batch] = lambda batch: batch,
    ) -> None:
        self.model = model
        self.traces = 0
        self._prepare = prepare

        def forward(inputs: Inputs, layout: Layout) -> tuple[mx.array | None, ...]:
            self.traces += is_traced(inputs["positions"])
            return self.values(head, inputs, layout)

        self._forward = compiled(model, forward)

    def values(
        self, head: Head | None, inputs: Inputs, layout: Layout
    ) -> tuple[mx.array | None, ...]:
        """Return NLL [M] and hit [M] of every target, and what else is summed."""
        return target_loss(self.model, head, inputs, layout, LossOptions(gradient=False))

    def batch_values(self, batch: Batch) -> Sequence[mx.array | None]:
        """Return the `values` of a batch."""
        return self._forward(arrays_of(batch), batch.layout)

    def examples(
        self, batches: Sequence[Batch], advance: Callable[[], None] | None = None
    ) -> ExampleScores:
        """Score every example of the batches, at least one."""

        def scored(batch: Batch) -> list[np.ndarray]:
            owners = batch.inputs["owners"]
            real = owners >= 0
            values = self.batch_values(self._prepare(batch))
            mx.eval(values)
            nll, *others = (np.array(value, dtype=np.float64)[real] for value in values)
            sums = (nll, None, *others)
            return [np.bincount(owners[real], weights, len(batch.examples)) for weights in sums]

        parts = over_batches(self.model, batches, scored, advance)
        order = [example for batch in batches for example in batch.examples]
        by_example = np.argsort(order, kind="stable")
        return ExampleScores(*(part[by_example] for part in parts))

    def score(
        self, batches: Sequence[Batch], advance: Callable[[], None] | None = None
    ) -> PerplexityScore:
        """Return the score of all examples, by token-weighted negative log-likelihood."""
        return self.examples(batches, advance).score


@dataclass(frozen=True)
class Evaluation:
    examples: ExampleScores
    answers: list[str] | None


def batches_of(base: Base, examples: Examples, settings: EvalSettings) -> list[Batch]:
    """Return every example once, by length; as trees where that is asked for and saves enough."""
    chosen = np.arange(len(examples))
    if settings.share_prefix != "off":
        least = WORTHWHILE if settings.share_prefix == "auto" else 0.0
        plan = TreePlan.of(examples, chosen, settings.batch_size, 0, least)
        saved = plan.saved(examples)
        is_enough = saved > 0 and saved >= least
        if is_enough and not why_in_rows(base, settings.max_seq_length, settings.share_prefix):
            return plan.held_out(examples, settings.max_seq_length, chosen).once()

    return evaluation_batches(examples, settings.batch_size, settings.max_seq_length)


def why_in_rows(base: Base, inputs: int, share_prefix: str) -> str | None:
    """Return why a model does not compute trees exactly; a PackError if they are asked for."""
    reason = why_no_trees(base.tokenizer)
    if reason is None:
        with activated(base, None, generation_path(base.model)):
            reason = why_not_shared(base.model, split_head(base.model), base.vocab_size)
    if reason is None:
        reason = why_length_matters(base.model, inputs)
    if reason and share_prefix == "on":
        family = base.config.get("model_type", base.name)
        raise PackError(
            f"--share-prefix on: a {family} model does not compute a common prefix exactly "
            f"({reason}). Leave it out.",
            "unsupported",
            "share_prefix",
        )
    return reason


class PerplexityEvaluator:
    """Perplexity, token accuracy and right answers of a causal model; see `evaluate.Evaluator`."""

    def __init__(self, base: Base, rows: Sequence[Row], settings: EvalSettings) -> None:
        length = settings.max_seq_length
        columns = settings.columns
        options = EncodingOptions(settings.loss_on, length, base.vocab_size)
        examples = encode_shown(rows, base, columns, options, settings.display)
        self._base = base
        self._display = settings.display
        self._batches = batches_of(base, examples, settings)

        self._exam = None
        metric = settings.own_metric
        if metric is None and (name := metric_of(settings.metric, columns)):
            metric = METRICS[name]
        if metric is not None:
            bad = {i for i, _ in examples.bad.errors}
            usable = [row for i, row in enumerate(rows) if i not in bad]
            row_format = format_of(usable[0], columns, TOKEN_FORMATS)
            questions = questions_of(usable, row_format, columns, base, metric, length)
            self._exam = Exam(base, metric, questions, settings.batch_size * length)

        self.matmul_path = scoring_path(base, self._batches, settings.matmul_path)

    def score(self) -> Evaluation:
        scorer = Scorer(self._base.model, split_head(self._base.model))
        with self._display.task("score", len(self._batches), "batches") as bar:
            examples = scorer.examples(self._batches, bar.advance)

        answers = None
        if self._exam:
            with self._display.task("score", len(self._exam.questions), "answers") as bar:
                answers = self._exam.answers(bar.advance)
        return Evaluation(examples, answers)

    def report(self, base: Evaluation, pack: Evaluation | None) -> EvalReport:
        score = base.examples.score
        answers = None
        if self._exam is not None:
            answers = self._exam.report(base.answers, pack and pack.answers)

        report = EvalReport(score.rows, score.targets, score, None, None, None, answers)
        if pack is None:
            return report
        difference = Difference.between(base.examples, pack.examples)
        ratio = difference.ppl_ratio
        return replace(report, pack=pack.examples.score, ppl_ratio=ratio, difference=difference)
