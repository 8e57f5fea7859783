"""Which tenth of the nightly tests `.ci/run` draws."""

from tests.helpers.tenth import SECONDS, tenth

NAMES = {f"tests/test_{i}.py::test": 60 if i == 9 else 1 for i in range(1500)}


def test_a_commit_draws_the_same_tenth_of_the_time_in_any_order():
    drawn = tenth(NAMES, "7babcafa")
    assert 0 <= sum(NAMES.values()) / 10 - sum(NAMES[name] for name in drawn) + SECONDS < 3
    assert tenth(dict(reversed(NAMES.items())), "7babcafa") == drawn


def test_commits_draw_all_tests_in_time():
    tenths = [tenth(NAMES, f"{i:040x}") for i in range(200)]
    assert set().union(*tenths) == set(NAMES)
    assert not tenth({}, "7babcafa")
