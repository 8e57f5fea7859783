"""A tenth of the nightly tests: `pytest -m nightly --tenth COMMIT`, which `.ci/run` does.

Another commit draws another tenth; the same commit always draws the same one. It is a tenth of the
time: a test that takes long has its seconds in its marker, as in ``nightly(seconds=40)``.
"""

import hashlib
from collections.abc import Mapping

import pytest

MARKER = "nightly"
SECONDS = 1  # of a test whose marker has none


def add_option(parser: pytest.Parser) -> None:
    parser.addoption("--tenth", metavar="COMMIT", help="run a tenth of the nightly tests")


def tenth(seconds: Mapping[str, float], commit: str) -> set[str]:
    """Return tests that take a tenth of the seconds of all, drawn by the hash of a commit."""

    def place(name: str) -> bytes:
        return hashlib.sha256(f"{commit} {name}".encode()).digest()

    drawn = set()
    left = sum(seconds.values()) / 10
    for name in sorted(seconds, key=place):
        if left > 0 and seconds[name] < left + SECONDS:
            drawn.add(name)
            left -= seconds[name]
    return drawn


def deselect(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the nightly tests that a commit does not draw, if ``--tenth`` names one."""
    commit = config.getoption("tenth")
    if commit is None:
        return

    marked = ((item.nodeid, item.get_closest_marker(MARKER)) for item in items)
    nightly = {name: mark.kwargs.get("seconds", SECONDS) for name, mark in marked if mark}
    out = set(nightly) - tenth(nightly, commit)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in out])
    items[:] = [item for item in items if item.nodeid not in out]
