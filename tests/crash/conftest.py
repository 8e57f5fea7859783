"""A server of processes that can be killed, and what they read."""

import sys
from collections.abc import Iterator

import pytest

from tests.crash.cases import Places
from tests.crash.server import Server

# A process that loaded Metal cannot be forked.
collect_ignore = ["test_crash.py"] if sys.platform == "darwin" else []


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture(scope="session")
def places(tmp_path_factory) -> Places:
    return Places(tmp_path_factory.mktemp("places"))
