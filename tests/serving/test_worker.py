"""The thread that computes outlives what goes wrong in it, and what is given up leaves it."""

import threading

import numpy as np
import pytest

from mlx_packs import load_base
from mlx_packs.errors import PackError
from mlx_packs.serving.embedding import EmbeddingWorker
from mlx_packs.serving.generation import TextWorker
from tests.helpers.serving import SECONDS, Running, texts_of, until
from tests.serving.conftest import LIMITS, started

ROW = np.array([2, 5, 3], dtype=np.int32)


@pytest.fixture
def embedder(encoder):
    with started(EmbeddingWorker(load_base(encoder), 4, 100)) as worker:
        yield worker


def test_a_worker_that_cannot_begin_says_so(small_tiny, monkeypatch):
    worker = TextWorker(small_tiny, LIMITS)
    monkeypatch.setattr(worker, "_reset", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        worker.start()
    worker.close(0.0)


def test_a_command_that_raises_ends_nothing(generator, caplog):
    generator.post(lambda: 1 / 0)
    assert texts_of(generator, [("base", [5, 6], 3)])[0] and generator.is_alive
    assert "ZeroDivisionError" in caplog.text


def test_commands_that_keep_coming_leave_time_for_texts(generator):
    ended = threading.Event()

    def again() -> None:
        if not ended.is_set():
            generator.post(again)

    generator.post(again)
    try:
        assert texts_of(generator, [("base", [5, 6], 3)])[0]
    finally:
        ended.set()


def test_a_worker_that_cannot_go_on_rejects_what_comes(generator, monkeypatch):
    def fails(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(generator._generator, "next", fails)
    monkeypatch.setattr(generator, "_reset", fails)
    with Running(generator) as server:
        body = {"model": "base", "prompt": "a", "max_tokens": 2}
        assert server.json("POST", "/v1/completions", body)[0] == 500
        until(lambda: not generator.is_alive)
        status, headers, _ = server.request("POST", "/v1/completions", body)
        assert status == 503 and headers["retry-after"]
        load = {"status": "stopping", "running": 0, "waiting": 0}
        assert server.json("GET", "/health") == (503, load)


def test_embeddings_that_are_given_up_leave_the_others_alone(embedder):
    go_on = threading.Event()
    embedder.post(lambda: go_on.wait(SECONDS))
    given_up = [embedder.submit("base", [ROW] * 9), embedder.submit("other", [ROW])]
    kept = embedder.submit("base", [ROW])
    assert all(future.cancel() for future in given_up)
    go_on.set()
    assert kept.result(SECONDS).shape == (1, embedder.base.model.dims)
    assert embedder.counts == (0, 0) and embedder.is_alive


def test_a_step_that_fails_ends_its_embeddings_alone(embedder, monkeypatch):
    def fails(*_):
        monkeypatch.undo()
        raise RuntimeError("out of memory")

    monkeypatch.setattr(embedder, "compute", fails)
    with pytest.raises(RuntimeError):
        embedder.submit("base", [ROW]).result(SECONDS)
    assert embedder.submit("base", [ROW]).result(SECONDS).shape[0] == 1


def test_closing_tells_those_who_wait_for_embeddings(embedder):
    go_on = threading.Event()
    embedder.post(lambda: go_on.wait(SECONDS))
    future = embedder.submit("base", [ROW])
    threading.Timer(0.05, go_on.set).start()
    embedder.close(0.0)
    with pytest.raises(PackError):
        future.result(SECONDS)
