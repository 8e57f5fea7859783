"""Which tenth of the nightly tests `.ci/run` draws."""

from tests.helpers.tenth import tenth

NAMES = [f"tests/test_{i}.py::test" for i in range(65)]


def test_a_commit_draws_the_same_tenth_in_any_order():
    drawn = tenth(NAMES, "7babcafa")
    assert len(drawn) == 7 and drawn < set(NAMES)
    assert tenth(NAMES[::-1], "7babcafa") == drawn


def test_commits_draw_all_tests_in_time():
    tenths = [tenth(NAMES, f"{i:040x}") for i in range(100)]
    assert set().union(*tenths) == set(NAMES)
    assert not tenth([], "7babcafa")
