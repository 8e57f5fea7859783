"""Decoders that embed and rerank over HTTP, each text with its own pack."""

from pathlib import Path

import numpy as np
import pytest

from mlx_packs import Pack, load_base
from mlx_packs.cli.serve import _served_task
from mlx_packs.errors import PackError
from mlx_packs.serving.embedding import EmbeddingWorker, Reranker
from tests.helpers.decoder_embedders import PROMPT, write_embedder, write_reranker
from tests.helpers.packs import random_pack
from tests.helpers.serving import Running

TEXTS = ["how do i fix a car?", "steps to repair the vehicle", "paint " * 60, "a"]
QUERY = "how do i fix a car?"


def pack_for(base, folder: Path, task: str, **objective: str) -> Pack:
    pack = random_pack(base, 1, 2, (), size=0.3)
    pack.manifest["objective"] = {"task": task, **objective}
    return pack.save(folder / task)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    """A base with the vectors of the texts, and a folder with a pack, with those of its own."""
    folder = tmp_path_factory.mktemp("embedder")
    base = load_base(write_embedder(folder / "base"))
    vectors = {"base": base.encode(TEXTS)}
    pack = pack_for(base, folder / "packs", "embedding", query_prompt="Q: ")
    with base.applied(pack):
        vectors["embedding"] = base.encode(TEXTS)
        vectors["queries"] = base.encode(TEXTS, prompt_name="query")
    assert np.abs(vectors["embedding"] - vectors["base"]).max() > 0.01

    worker = EmbeddingWorker(base, 3, 100)
    worker.start()
    with Running(worker, folder / "packs") as running:
        yield running, vectors
    worker.close(0.0)


def test_vectors_are_those_of_python(embedder):
    server, vectors = embedder
    for model in ("base", "embedding"):
        status, answer = server.json("POST", "/v1/embeddings", {"model": model, "input": TEXTS})
        assert status == 200
        own = np.array([entry["embedding"] for entry in answer["data"]])
        np.testing.assert_allclose(own, vectors[model], atol=2e-5)

    body = {"model": "embedding", "input": TEXTS, "prompt_name": "query"}
    answer = server.json("POST", "/v1/embeddings", body)[1]
    own = np.array([entry["embedding"] for entry in answer["data"]])
    np.testing.assert_allclose(own, vectors["queries"], atol=2e-5)

    # how many texts share a batch depends on the time that earlier ones took
    body = {"model": "base", "input": TEXTS, "prompt_name": "query"}
    prompted = server.json("POST", "/v1/embeddings", body)[1]["data"]
    body = {"model": "base", "input": [PROMPT + text for text in TEXTS]}
    written = server.json("POST", "/v1/embeddings", body)[1]["data"]
    assert [each["index"] for each in prompted] == [each["index"] for each in written]
    prompted, written = ([each["embedding"] for each in data] for data in (prompted, written))
    np.testing.assert_allclose(prompted, written, atol=2e-5)


def test_other_routes_say_what_is_served(embedder):
    server, _ = embedder
    body = {"model": "base", "query": "a", "documents": ["b"]}
    status, answer = server.json("POST", "/v1/rerank", body)
    assert status == 400 and "/v1/embeddings" in answer["error"]["message"]
    body = {"model": "base", "prompt": "a"}
    status, answer = server.json("POST", "/v1/completions", body)
    assert status == 400 and "/v1/embeddings" in answer["error"]["message"]


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reranker")
    base = load_base(write_reranker(folder / "base"))
    scores = {"base": base.rerank(QUERY, TEXTS)}
    pack = pack_for(base, folder / "packs", "rerank", instruction="Find the same question")
    with base.applied(pack):
        scores["rerank"] = base.rerank(QUERY, TEXTS)

    worker = Reranker(base, 3, 100)
    worker.start()
    with Running(worker, folder / "packs") as running:
        yield running, scores
    worker.close(0.0)


@pytest.mark.parametrize("model", ["base", "rerank"])
def test_ranks_are_those_of_python(reranker, model):
    server, scores = reranker
    body = {"model": model, "query": QUERY, "documents": [*TEXTS[:3], {"text": TEXTS[3]}]}
    status, answer = server.json("POST", "/v1/rerank", body)
    assert status == 200 and answer["usage"]["total_tokens"] > 100

    results = answer["results"]
    assert [each["index"] for each in results] == np.argsort(-scores[model]).tolist()
    own = [each["relevance_score"] for each in results]
    np.testing.assert_allclose(own, np.sort(scores[model])[::-1], atol=2e-5)

    body |= {"top_n": 1, "return_documents": True}
    (best,) = server.json("POST", "/v1/rerank", body)[1]["results"]
    assert best["document"]["text"] == TEXTS[int(np.argmax(scores[model]))]


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "other"}, 404, "model"),
        ({"documents": []}, 400, "documents"),
        ({"documents": ["a", " "]}, 400, "documents"),
        ({"documents": "a"}, 400, "documents"),
        ({"query": " "}, 400, "query"),
        ({"top_n": 0}, 400, "top_n"),
    ],
)
def test_requests_that_cannot_be_answered_say_why(reranker, fields, status, param):
    body = {"model": "base", "query": QUERY, "documents": TEXTS} | fields
    actual, answer = reranker[0].json("POST", "/v1/rerank", body)
    assert (actual, answer["error"]["param"]) == (status, param)


def test_server_does_what_its_packs_and_base_are_made_for(embedder, reranker, tiny):
    embeds = embedder[0].worker.base
    packs = dict(embedder[0].worker.registry.packs)
    assert _served_task("auto", embeds, {}) == _served_task("auto", embeds, packs) == "embedding"
    assert _served_task("auto", tiny, {}) == "lm" and _served_task("rerank", tiny, {}) == "rerank"
    ranks = dict(reranker[0].worker.registry.packs)
    assert _served_task("auto", reranker[0].worker.base, ranks) == "rerank"
    with pytest.raises(PackError, match="Serve them apart"):
        _served_task("auto", tiny, packs | ranks)
