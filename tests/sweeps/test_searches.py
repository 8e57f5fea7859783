"""The trials of a sweep: their values, and that a seed determines them."""

import pytest

from mlx_packs.errors import PackError
from mlx_packs.sweeps.plan import SweepConfig, parse_space, planned_values, with_values
from tests.helpers.errors import raises

RATE = {"min": "1e-5", "max": 1e-3, "scale": "log"}


def values(search, parameters, **settings):
    config = SweepConfig(search, parameters=parameters, **settings)
    return planned_values(config, parse_space(parameters, "f"), "f")


def test_grid_has_every_combination_once_in_order():
    drawn = values("grid", {"rank": [8, 16], "learning_rate": [1e-4, 0.5]})
    in_order = [(8, 1e-4), (8, 0.5), (16, 1e-4), (16, 0.5)]
    assert drawn == [{"rank": rank, "learning_rate": rate} for rank, rate in in_order]


def test_a_seed_gives_the_same_values_and_another_seed_others():
    parameters = {"learning_rate": RATE, "rank": [8, 16, 32]}
    first = values("random", parameters, trials=20, seed=3)
    assert len({tuple(v.items()) for v in first}) == 20
    assert first == values("random", parameters, trials=20, seed=3)
    assert first != values("random", parameters, trials=20, seed=4)
    assert first[:5] == values("random", parameters, trials=5, seed=3)


def test_log_scale_draws_as_many_from_each_power_of_ten():
    drawn = [v["learning_rate"] for v in values("random", {"learning_rate": RATE}, trials=400)]
    assert all(1e-5 <= rate <= 1e-3 for rate in drawn)
    assert 150 < sum(rate < 1e-4 for rate in drawn) < 250
    linear = {"learning_rate": {**RATE, "scale": "linear"}}
    drawn = [v["learning_rate"] for v in values("random", linear, trials=400)]
    assert sum(rate < 1e-4 for rate in drawn) < 80


def test_integers_stay_integers_and_reach_both_ends():
    drawn = [v["rank"] for v in values("random", {"rank": {"min": 1, "max": 4}}, trials=4)]
    assert sorted(drawn) == [1, 2, 3, 4] and all(type(rank) is int for rank in drawn)


def test_random_search_finds_every_combination_of_a_small_space():
    parameters = {"rank": [1, 2, 4], "seed": [0, 1]}
    drawn = values("random", parameters, trials=6)
    assert len({tuple(v.items()) for v in drawn}) == 6


def test_keys_in_mappings_leave_the_others():
    recipe = {"rank": 8, "rank_pattern": {"q_proj": 4}}
    changed = with_values(recipe, {"rank_pattern.v_proj": 2, "rank": 16})
    assert changed == {"rank": 16, "rank_pattern": {"q_proj": 4, "v_proj": 2}}
    assert recipe == {"rank": 8, "rank_pattern": {"q_proj": 4}}


@pytest.mark.parametrize(
    ("rank", "code"),
    [
        ([], "invalid"),
        (8, "invalid"),
        ([8, 8], "invalid"),
        ({"min": 8}, "invalid"),
        ({"min": 8, "max": 8}, "invalid"),
        ({"min": 0, "max": 8, "scale": "log"}, "invalid"),
        ({"min": 1, "max": float("inf")}, "invalid"),
        ({"min": 1, "max": 8, "scale": "ln"}, "unknown"),
        ({"min": 1, "max": 8, "step": 1}, "unknown"),
    ],
)
def test_wrong_parameters_are_errors(rank, code):
    with raises(code, None, "f: sweep.parameters"):
        parse_space({"rank": rank}, "f")


def test_a_grid_of_a_range_and_too_few_combinations_are_errors():
    with pytest.raises(PackError, match=r"sweep\.parameters\.rank: is a range"):
        values("grid", {"rank": {"min": 1, "max": 4}})
    with pytest.raises(PackError, match=r"sweep\.trials: is 3"):
        values("random", {"rank": [1, 2]}, trials=3)
    with pytest.raises(PackError, match="only 2 different"):
        values("random", {"rank": {"min": 1, "max": 2}}, trials=3)
    for search, trials in (("grid", 3), ("random", 0), ("random", None)):
        with pytest.raises(PackError, match="trials"):
            SweepConfig(search, trials=trials)


BASE = "data: tiny\niters: 9\n"
FAULTS = {
    "sweep: {parameters: {rnk: [1]}}": "unknown",
    "sweep: {parameters: {rank: [4, 0]}}": "invalid",
    "sweep: {parameters: {rank: [x]}}": "invalid",
    "sweep: {parameters: {out: [x]}}": "conflict",
    "sweep: {parameters: {task: [lm, grpo]}}": "conflict",
    "model: tiny\nsweep: {parameters: {data: [nowhere, tiny]}}": "not-found",
    "sweep: {metric: pll, parameters: {rank: [4]}}": "unknown",
    "sweep: {seach: grid, parameters: {rank: [4]}}": "unknown",
    "sweep: {search: random, parameters: {rank: [4]}}": "invalid",
    "sweep: {search: tpe, trials: 2, parameters: {rank: [4, 8]}}": "unknown",
    "sweep: {search: halving, trials: 2, parameters: {rank: [4, 8]}}": "unknown",
    "sweep: {min_iters: 10, parameters: {rank: [4, 8]}}": "unknown",
    "resume: true\nsweep: {parameters: {rank: [4]}}": "conflict",
    "task: reward\nsweep: {parameters: {rank: [4]}}": "conflict",
    "itrs: 3\nsweep: {parameters: {rank: [4]}}": "unknown",
    "rank: 4": "invalid",
}


@pytest.mark.parametrize("text", FAULTS)
def test_bad_files_are_one_line_before_anything_is_written(here, rejected, text):
    (here / "s.yaml").write_text(BASE + text)
    assert rejected("sweep", "-c", "s.yaml").code == FAULTS[text]
    assert [file.name for file in here.iterdir()] == ["s.yaml"]
