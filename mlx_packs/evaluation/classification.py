"""Accuracy, macro F1, log loss and calibration of a classifier on held-out examples.

The expected calibration error has 15 bins of equal width (https://arxiv.org/abs/1706.04599), as has
the temperature that is fitted to logits. A mean has its standard error; the standard errors of
other metrics are from 200 bootstrap samples.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ..config.choices import TASKS
from ..data.dataset import Batch
from ..data.encoding import EncodingOptions
from ..data.formats import Row
from ..data.labelled import encode_labelled
from ..data.labels import MULTI, ORDINAL, REGRESSION, Classes, probabilities
from ..data.texts import TextGroups
from ..objectives.reader import label_reader
from ..objectives.text_loss import TextLoss, label_losses
from ..packs.facts import mistake_lines
from .embeddings import pearson, spearman
from .scores import MetricReport, MetricScore, TextEvaluator, over_batches, standard_error

_BINS = 15
_RESAMPLES = 200
_MOST_MISTAKES = 10  # that people see
_COLDEST = 0.05  # a temperature is between it and its inverse

VALIDATED = ("valid_loss", "valid_accuracy", "valid_macro_f1", "valid_spearman")

Metric = Callable[[np.ndarray], float]  # of the numbers of some examples


@dataclass(frozen=True)
class Predictions:
    """Logits float64 [N, classes] of examples, and their labels as `Classes.encoded` has them."""

    logits: np.ndarray
    values: np.ndarray
    problem: str

    def at(self, temperature: float) -> "Predictions":
        return replace(self, logits=self.logits / temperature)

    def losses(self) -> np.ndarray:
        """Return the loss of each example, [N]; of several labels the mean over labels."""
        if self.problem == REGRESSION:
            return (self.logits[:, 0] - self.values) ** 2
        if self.problem == MULTI:
            signs = np.where(self.values, 1.0, -1.0)
            return np.logaddexp(0, -signs * self.logits).mean(axis=1)

        rows = np.arange(len(self.values))
        totals = np.logaddexp.reduce(self.logits, axis=1)
        return totals - self.logits[rows, self.values]

    def metrics(self) -> dict[str, float | None]:
        """Return each metric, and its standard error as ``<name>_se``; ``loss`` comes first."""
        losses = self.losses()
        if self.problem == REGRESSION:
            return {"loss": float(losses.mean()), **self._of_scores(losses)}

        means = {"accuracy": self._is_right().astype(np.float64), "log_loss": losses}
        metrics: dict[str, float | None] = {"loss": float(losses.mean())}
        for name, values in means.items():
            metrics |= {name: float(values.mean()), f"{name}_se": standard_error(values)}

        metrics["commonest_share"] = commonest_share(self.values)
        if self.problem == ORDINAL:
            distances = np.abs(self.predicted() - self.values).astype(np.float64)
            metrics |= {"mae": float(distances.mean()), "mae_se": standard_error(distances)}

        return metrics | self._resampled(
            {"macro_f1": self._macro_f1(), "calibration_error": self._calibration_error()}
        )

    def predicted(self) -> np.ndarray:
        """Return the most likely class of each, int [N]; of several, bool [N, classes]."""
        if self.problem == MULTI:
            return self.logits > 0
        return self.logits.argmax(axis=1)

    @property
    def all_right(self) -> bool:
        return bool(self._is_right().all())

    def _is_right(self) -> np.ndarray:
        right = self.predicted() == self.values
        if self.problem == MULTI:
            return right.all(axis=1)
        return right

    def _of_scores(self, losses: np.ndarray) -> dict[str, float | None]:
        scores = self.logits[:, 0]
        return self._resampled(
            {
                "rmse": lambda chosen: float(np.sqrt(losses[chosen].mean())),
                "spearman": lambda chosen: spearman(scores[chosen], self.values[chosen]),
                "pearson": lambda chosen: pearson(scores[chosen], self.values[chosen]),
            }
        )

    def _resampled(self, metrics: Mapping[str, Metric]) -> dict[str, float | None]:
        """Return metrics of all examples, with the standard deviation over bootstrap samples."""
        count = len(self.values)
        samples = np.random.default_rng(0).integers(0, count, (_RESAMPLES, count))
        result: dict[str, float | None] = {}

        for name, metric in metrics.items():
            result[name] = metric(np.arange(count))
            result[f"{name}_se"] = None
            if count > 1:
                result[f"{name}_se"] = float(np.std([metric(each) for each in samples], ddof=1))

        return result

    def _macro_f1(self) -> Metric:
        """Mean F1 of the classes that are there or predicted, as in scikit-learn."""
        classes = self.logits.shape[1]
        predicted = self.predicted()
        values = self.values

        def count(labels: np.ndarray) -> np.ndarray:
            if self.problem == MULTI:
                return labels.sum(axis=0)
            return np.bincount(labels, minlength=classes)

        def macro_f1(chosen: np.ndarray) -> float:
            named = predicted[chosen]
            right = values[chosen]
            both = named & right if self.problem == MULTI else named[named == right]

            counts = count(named) + count(right)
            present = counts > 0
            if not present.any():
                return 1.0
            return float((2 * count(both)[present] / counts[present]).mean())

        return macro_f1

    def _calibration_error(self) -> Metric:
        """Mean distance of confidence and accuracy over bins, weighted by their examples.

        Every decision about a label counts if there may be several.
        """
        likely = probabilities(self.logits, self.problem)
        right = self.values
        if self.problem != MULTI:
            likely = likely.max(axis=1)
            right = self._is_right()

        def calibration_error(chosen: np.ndarray) -> float:
            confidence = likely[chosen].ravel()
            bins = np.minimum((confidence * _BINS).astype(int), _BINS - 1)
            gaps = np.bincount(bins, weights=right[chosen].ravel() - confidence, minlength=_BINS)
            return float(np.abs(gaps).sum() / len(confidence))

        return calibration_error

    def mistakes(self, labels: Sequence[str]) -> list[tuple[str, str, int]]:
        """Return the most frequent mistakes: right label, predicted one, number."""
        if self.problem in (MULTI, REGRESSION):
            return []

        predicted = self.predicted()
        wrong = np.flatnonzero(predicted != self.values)
        pairs = zip(self.values[wrong].tolist(), predicted[wrong].tolist(), strict=True)
        common = Counter(pairs).most_common(_MOST_MISTAKES)
        return [(labels[right], labels[given], count) for (right, given), count in common]


def commonest_share(values: np.ndarray) -> float:
    """Return the share of the commonest value, or set of labels: a constant answer's accuracy."""
    return float(np.unique(values, axis=0, return_counts=True)[1].max() / len(values))


def fit_temperature(predictions: Predictions) -> float:
    """Return the temperature with the least log loss, by a search of thirds over its logarithm."""
    low = np.log(_COLDEST)
    high = -low

    def loss(log_temperature: float) -> float:
        return float(predictions.at(np.exp(log_temperature)).losses().mean())

    for _ in range(60):
        third = (high - low) / 3
        if loss(low + third) < loss(high - third):
            high -= third
        else:
            low += third

    return float(np.exp((low + high) / 2))


def predict(
    objective: TextLoss,
    batches: Sequence[Batch],
    problem: str,
    advance: Callable[[], None] | None = None,
) -> Predictions:
    """Return the predictions of all examples of some batches, at least one, in evaluation mode."""
    logits, _, labels = over_batches(objective.model, batches, objective.outputs, advance)
    return Predictions(logits, labels, problem)


def class_score(predictions: Predictions) -> MetricScore:
    """Return metrics as validations name them, and as manifests do: ``label_accuracy``."""
    metrics = predictions.metrics()
    validated = {
        name: value
        for name, value in metrics.items()
        if f"valid_{name.removesuffix('_se')}" in VALIDATED
    }

    reported = {
        f"{name}{suffix}": metrics[f"{key}{suffix}"]
        for name in TASKS["classify"].metrics
        if (key := name.removeprefix("label_")) in metrics
        for suffix in ("", "_se")
    }
    if "commonest_share" in metrics:
        reported["commonest_share"] = metrics["commonest_share"]
    return MetricScore(metrics["loss"], validated, len(predictions.values), reported)


def validated_numbers(problem: str) -> tuple[str, ...]:
    if problem == REGRESSION:
        return ("valid_loss", "valid_spearman")
    return ("valid_loss", "valid_accuracy", "valid_macro_f1")


class ClassifierEvaluator(TextEvaluator):
    """The metrics of a pack that classifies."""

    what = "a classifier"

    def encoded(self, rows: Sequence[Row]) -> TextGroups:
        self.classes = Classes.of(self.settings.pack.manifest)
        options = EncodingOptions(max_seq_length=self.limit, vocab_size=self.base.vocab_size)
        columns = self.settings.columns
        return encode_labelled(rows, self.base.tokenizer, columns, options, self.classes)

    def scored(self, advance: Callable[[], None]) -> Predictions:
        problem = self.classes.problem
        reader = label_reader(self.base, self.base.active.attached.score, problem)
        objective = TextLoss(reader, partial(label_losses, problem=problem))
        return predict(objective, self.batches, problem, advance)

    def report(self, base: None, pack: Predictions) -> MetricReport:
        classes = self.classes
        predictions = pack.at(classes.temperature)
        mistakes = predictions.mistakes(classes.labels)
        facts = {
            "problem_type": classes.problem,
            "labels": len(classes.labels),
            "temperature": classes.temperature,
            "mistakes": mistakes,
        }

        notes = mistake_lines(mistakes)
        if classes.temperature != 1:
            text = f"        probabilities at temperature {classes.temperature:.3f}"
            notes.insert(0, text)
        return MetricReport(self.examples, base, predictions.metrics(), facts, notes)
