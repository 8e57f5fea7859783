"""The deadline covers tokenizing; others have their turn meanwhile, and clients that leave end it."""

import http.client
import json
import time

import numpy as np
import pytest

from mlx_packs import load_base
from mlx_packs.bases.tokenizer import tokens_of
from mlx_packs.objectives.reader import rerank_rows
from mlx_packs.serving import app
from mlx_packs.serving.embedding import EmbeddingWorker
from tests.helpers.errors import raises
from tests.helpers.serving import until
from tests.serving.conftest import serving

PATH = "/v1/embeddings"
SLOW = {"model": "base", "input": ["slow"] * 640}  # ten parts, of which each takes 0.1 s


@pytest.fixture
def tokenized(monkeypatch) -> list[int]:
    """The sizes of the parts that were tokenized so far; those that say "slow" take their time."""
    parts = []

    def slow(tokenizer, texts, limit):
        if texts[0] == "slow":
            time.sleep(0.1)
        parts.append(len(texts))
        return tokens_of(tokenizer, texts, limit)

    monkeypatch.setattr(app, "tokens_of", slow)
    return parts


@pytest.fixture(scope="module")
def server(encoder):
    worker = EmbeddingWorker(load_base(encoder), 5, 1000)
    with serving(worker, request_seconds=0.5) as running:
        yield running


@pytest.fixture
def slow(server, tokenized) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request("POST", PATH, json.dumps(SLOW), {"Content-Type": "application/json"})
    until(lambda: bool(tokenized))
    return connection


def test_the_deadline_covers_tokenizing_and_others_have_their_turn(server, tokenized, slow):
    status, _ = server.json("POST", PATH, {"model": "base", "input": ["a"]})
    assert status == 200 and 1 in tokenized[:6]  # between two parts of the other

    assert slow.getresponse().status == 504
    slow.close()
    assert len(tokenized) < 9


def test_a_client_that_leaves_ends_its_tokenizing(tokenized, slow):
    slow.close()
    time.sleep(0.25)
    assert len(tokenized) <= 3


def test_a_query_that_leaves_no_room_is_an_error(small_tiny):
    with raises("invalid", "query"):
        rerank_rows(small_tiny, "word " * 1_000_000, ["a"] * 1000, None, 2048)


def test_of_a_long_text_only_the_beginning_is_tokenized(encoder):
    tokenizer = load_base(encoder).tokenizer
    characters = []

    def tokenize(texts, **options):
        characters.extend(map(len, texts))
        return tokenizer(texts, **options)

    (tokens,) = tokens_of(tokenize, ["a b " * 2_000_000], 8)
    assert tokens.tolist() == tokens_of(tokenizer, ["a b " * 8], 8)[0].tolist()
    assert characters[0] < 1000


def test_a_short_request_does_not_wait_for_a_long_one(server):
    worker = server.worker
    rows = [np.arange(1, 9, dtype=np.int32)] * 400
    until(lambda: worker.counts == (0, 0))  # of earlier requests
    seen = []

    def submit_both():
        """Submit both between two steps, so that no step is taken before the callback is there."""
        before = worker.steps
        long, short = worker.submit("base", rows), worker.submit("base", rows[:1])
        short.add_done_callback(lambda _: seen.append((worker.steps - before, long.done())))
        return long

    long = worker.call(submit_both).result()
    until(lambda: seen)
    ((steps, long_is_done),) = seen
    assert steps <= 3 and not long_is_done
    assert len(long.result(60)) == 400
