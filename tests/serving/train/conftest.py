"""A server that trains, on two blocks of the bundled base."""

import threading
from contextlib import contextmanager

import pytest

from mlx_packs.serving.generation import TextWorker
from mlx_packs.serving.train.service import TrainingService
from tests.helpers.serving import SECONDS, Running
from tests.helpers.tinker import TinkerClient
from tests.serving.conftest import LIMITS, started


class Training(Running):
    """A server whose clients save in ``folder``."""

    def __init__(self, worker, folder, **settings) -> None:
        self.folder = folder
        super().__init__(
            worker, training=lambda settings: TrainingService(worker, folder, settings), **settings
        )


@pytest.fixture
def generator(small_tiny):
    """What computes, with dense weights: a CPU takes a fraction of the time."""
    with started(TextWorker(small_tiny, LIMITS, "dense")) as worker:
        yield worker


@pytest.fixture
def server(generator, tmp_path):
    with Training(generator, tmp_path) as running:
        yield running


@pytest.fixture
def client(server):
    return TinkerClient(server)


@pytest.fixture
def tokens(generator) -> list[int]:
    return generator.base.tokenizer.encode("The list of names is empty, and so is the table.")


@pytest.fixture
def datum(tokens):
    return tokens[:-1], {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}


@pytest.fixture
def hold(server):
    @contextmanager
    def held():
        may_go_on = threading.Event()
        busy = server.worker.call(lambda: may_go_on.wait(SECONDS))
        try:
            yield
        finally:
            may_go_on.set()
            busy.result()

    return held
