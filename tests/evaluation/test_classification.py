"""Metrics of classifiers against their formulas, and against scikit-learn."""

import numpy as np
import pytest

from mlx_packs.data.labels import MULTI, REGRESSION, SINGLE
from mlx_packs.evaluation.classification import (
    Predictions,
    class_score,
    fit_temperature,
)
from mlx_packs.packs.facts import format_change, held_out_line


def predictions(count: int = 300, classes: int = 5, noise: float = 2.0) -> Predictions:
    random = np.random.default_rng(0)
    values = random.integers(0, classes - 1, count)  # the last class is never right
    logits = noise * random.normal(size=(count, classes)) + 2 * np.eye(classes)[values]
    return Predictions(logits, values, SINGLE)


def test_metrics_of_one_label_are_as_defined():
    made = predictions()
    likely = np.exp(made.logits) / np.exp(made.logits).sum(axis=1, keepdims=True)
    predicted = likely.argmax(axis=1)
    right = predicted == made.values
    metrics = made.metrics()

    assert metrics["accuracy"] == pytest.approx(right.mean())
    assert metrics["accuracy_se"] == pytest.approx(np.sqrt(right.var(ddof=1) / 300))
    log_loss = -np.log(likely[np.arange(300), made.values])
    assert metrics["log_loss"] == metrics["loss"] == pytest.approx(log_loss.mean())

    error = 0.0
    for low in np.arange(15) / 15:
        inside = (likely.max(axis=1) >= low) & (likely.max(axis=1) < low + 1 / 15)
        if inside.any():
            gap = right[inside].mean() - likely.max(axis=1)[inside].mean()
            error += inside.mean() * abs(gap)
    assert metrics["calibration_error"] == pytest.approx(error)
    assert 0.01 < metrics["macro_f1_se"] < 0.06 and 0.005 < metrics["calibration_error_se"] < 0.06


def test_several_labels_and_scores():
    logits = np.array([[2.0, -1.0], [-3.0, 1.0], [1.0, 1.0]])
    values = np.array([[True, False], [True, True], [True, False]])
    metrics = Predictions(logits, values, MULTI).metrics()
    likely = 1 / (1 + np.exp(-logits))
    assert metrics["accuracy"] == pytest.approx(1 / 3)
    assert metrics["commonest_share"] == pytest.approx(2 / 3)
    assert metrics["log_loss"] == pytest.approx(
        -np.log(np.where(values, likely, 1 - likely)).mean()
    )
    assert metrics["macro_f1"] == pytest.approx((4 / 5 + 2 / 3) / 2)

    scores = Predictions(np.array([[1.0], [2.0], [4.0]]), np.array([1.0, 2.0, 3.0]), REGRESSION)
    metrics = scores.metrics()
    assert metrics["rmse"] == pytest.approx(np.sqrt(1 / 3)) and metrics["spearman"] == 1

    one = Predictions(np.array([[1.0, 2.0]]), np.array([0]), SINGLE).metrics()
    assert one["accuracy"] == 0 and one["accuracy_se"] is one["macro_f1_se"] is None


def test_a_temperature_minimizes_the_log_loss():
    made = predictions(2000)
    temperature = fit_temperature(made)
    losses = [
        made.at(t).losses().mean() for t in (0.99 * temperature, temperature, 1.01 * temperature)
    ]
    assert losses[1] < min(losses[0], losses[2])
    assert fit_temperature(made.at(3.0)) == pytest.approx(temperature / 3, rel=1e-3)
    assert made.at(temperature).metrics()["calibration_error"] < made.metrics()["calibration_error"]


def test_mistakes_come_by_their_number():
    logits = np.eye(3)[[1, 1, 2, 0]]
    made = Predictions(logits, np.array([0, 0, 1, 0]), SINGLE)
    assert made.mistakes(["a", "b", "c"]) == [("a", "b", 2), ("b", "c", 1)]


def test_the_commonest_label_is_beside_the_accuracy():
    always = Predictions(np.array([[2.0, 0.0]] * 24), np.array([0] * 23 + [1]), SINGLE)
    metrics = always.metrics()
    assert metrics["accuracy"] == metrics["commonest_share"] == 23 / 24
    assert "(commonest label 0.9583)" in class_score(always).text
    assert "accuracy 0.9583 ± 0.0417" in class_score(always).text

    eval_part = {"label_accuracy_before": 0.3, "label_accuracy_after": 23 / 24}
    eval_part |= {"commonest_share": 23 / 24}
    assert format_change(eval_part).endswith("(commonest label 0.9583)")
    assert "commonest label has 95.8%" in held_out_line({"rows": 24, **eval_part})


@pytest.mark.interop
def test_scikit_learn_has_the_same_numbers():
    metrics = pytest.importorskip("sklearn.metrics")
    made = predictions()
    ours = made.metrics()
    likely = np.exp(made.logits - np.logaddexp.reduce(made.logits, axis=1)[:, None])
    f1 = metrics.f1_score(made.values, made.predicted(), average="macro")
    assert ours["macro_f1"] == pytest.approx(f1)
    loss = metrics.log_loss(made.values, likely, labels=np.arange(5))
    assert ours["log_loss"] == pytest.approx(loss)
