"""Cases of a test of which the default suite runs some, and the slow suite the others."""

from collections.abc import Iterable

import pytest


def slow_except(cases: Iterable, *default: object) -> list:
    """Return parameters that are slow but for some; a tuple has a value for each argument."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if case in default else pytest.mark.slow,
        )
        for case in cases
    ]
