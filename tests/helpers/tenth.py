"""A tenth of the nightly tests: `pytest -m nightly --tenth COMMIT`, which `.ci/run` does.

Another commit draws another tenth; the same commit always draws the same one.
"""

import hashlib
from collections.abc import Sequence

import pytest

MARKER = "nightly"


def add_option(parser: pytest.Parser) -> None:
    parser.addoption("--tenth", metavar="COMMIT", help="run a tenth of the nightly tests")


def tenth(names: Sequence[str], commit: str) -> set[str]:
    """Return a tenth of the names, rounded up, drawn by the hash of a commit."""

    def drawn(name: str) -> bytes:
        return hashlib.sha256(f"{commit} {name}".encode()).digest()

    return set(sorted(names, key=drawn)[: -(-len(names) // 10)])


def deselect(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the nightly tests that a commit does not draw, if ``--tenth`` names one."""
    commit = config.getoption("tenth")
    if commit is None:
        return

    nightly = [item.nodeid for item in items if item.get_closest_marker(MARKER)]
    out = set(nightly) - tenth(nightly, commit)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in out])
    items[:] = [item for item in items if item.nodeid not in out]
