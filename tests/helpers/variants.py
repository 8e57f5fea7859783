"""Cases of a test of which a suite runs some, and a rarer one the others."""

from collections.abc import Iterable

import pytest

from tests.helpers.tenth import SECONDS


def slow_except(cases: Iterable, *default: object) -> list:
    """Return parameters that are slow but for some; a tuple has a value for each argument."""
    return [_marked(case, () if case in default else pytest.mark.slow) for case in cases]


def nightly_except(
    cases: Iterable, *often: object, often_is: object = pytest.mark.slow, seconds: float = SECONDS
) -> list:
    """Return parameters that are nightly but for some, which are slow or have another mark."""
    nightly = pytest.mark.nightly(seconds=seconds)
    return [_marked(case, often_is if case in often else nightly) for case in cases]


def _marked(case: object, marks: object) -> object:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=marks)
