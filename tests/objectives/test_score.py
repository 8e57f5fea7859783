"""One number that runs are compared by: its direction, and what files have of it."""

import pytest

from mlx_packs.objectives.score import LOSS, REWARD, StoredScore, was_scored

NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("measure", "value", "other", "by", "is_better"),
    [
        (LOSS, 1.0, 2.0, 0.0, True),
        (LOSS, 2.0, 1.0, 0.0, False),
        (LOSS, 1.0, 1.0, 0.0, False),
        (LOSS, -0.4, -0.1, 0.0, True),
        (LOSS, 1.0, 1.005, 0.01, False),
        (LOSS, -1.005, -1.0, 0.01, False),
        (LOSS, NAN, 1.0, 0.0, False),
        (REWARD, -0.1, -0.4, 0.0, True),
        (REWARD, 0.5, 0.499, 0.01, False),
    ],
)
def test_a_score_is_better_in_its_direction(measure, value, other, by, is_better):
    score = StoredScore(value, measure)
    assert score.is_better_than(StoredScore(other, measure), by) is is_better


@pytest.mark.parametrize(("value", "is_better"), [(1.0, True), (NAN, False), (INFINITE, False)])
def test_any_finite_score_is_better_than_none(value, is_better):
    assert StoredScore(value).is_better_than(None) is is_better


@pytest.mark.parametrize(
    ("stored", "score"),
    [
        ({"valid_loss": 1.5, "valid_ppl": 4.4}, StoredScore(1.5, LOSS)),
        ({"valid_reward": 0.3}, StoredScore(0.3, REWARD)),
        ({"valid_loss": -0.3, "valid_reward": 0.3}, StoredScore(0.3, REWARD)),
        ({"valid_loss": None}, None),
        ({"loss": 1.0}, None),
    ],
)
def test_a_score_is_read_from_lines_and_states(stored, score):
    assert StoredScore.of(stored) == score
    assert was_scored(stored) is ("loss" not in stored)
