"""Scores of held-out examples, as the metrics of a run keep them."""

import json

import pytest

from mlx_packs.evaluation.perplexity import PerplexityScore
from mlx_packs.evaluation.scores import MetricScore
from mlx_packs.tasks.grpo import MeanReward
from mlx_packs.training.run_folder import RunFolder

PREFERENCES = {"preference_accuracy": 0.5, "reward_margin": 0.1}


@pytest.mark.parametrize(
    "score",
    [
        MetricScore(0.5, PREFERENCES, 4, {"chosen_ppl": 9.0}),
        MetricScore(0.5, {"accuracy": 1.0, "accuracy_se": None}, 4),
        PerplexityScore(4.0, None, 0.5, 1.4, 2, 8),
        MeanReward(0.3, 4),
    ],
)
def test_a_resumed_run_reads_the_scores_after_a_phase(tmp_path, score):
    line = {"batch": 3, "held_out": {"first": score.to_json()}, "phase": "first"}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (read,) = RunFolder(tmp_path).metrics()
    again = type(score).from_json(read["held_out"]["first"])
    assert (again.value, again.perplexity) == (score.value, score.perplexity)


def test_a_validation_has_metrics_without_their_errors():
    score = MetricScore(0.5, PREFERENCES | {"reward_margin_se": 0.02}, 4, {"commonest_share": 0.7})
    names = ("valid_loss", "valid_preference_accuracy", "valid_reward_margin")
    assert score.entries == dict(zip(names, (0.5, 0.5, 0.1), strict=True))
    assert score.text == (
        "loss 0.500, preference accuracy 0.5000, reward margin 0.1000 ± 0.0200 "
        "(commonest label 0.7000)"
    )
