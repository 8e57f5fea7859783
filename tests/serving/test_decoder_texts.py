"""Decoders that embed and rerank over HTTP, each text with its own pack."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from mlx_packs import LoRAConfig, Pack, TrainConfig, load_base, train_pack
from mlx_packs.cli.serve import _served_task
from mlx_packs.objectives.reader import rerank_rows
from mlx_packs.serving.embedding import EmbeddingWorker, Reranker
from tests.helpers.decoder_embedders import PROMPT, write_embedder, write_reranker
from tests.helpers.encoders import all_rankings, write_pairs
from tests.helpers.errors import raises
from tests.helpers.packs import random_pack
from tests.serving.conftest import serving, started

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

    with serving(EmbeddingWorker(base, 3, 100), folder / "packs") as running:
        yield running, vectors


def embedded(server, texts=TEXTS, **fields) -> np.ndarray:
    status, answer = server.json("POST", "/v1/embeddings", {"input": texts, **fields})
    assert status == 200 and [each["index"] for each in answer["data"]] == [0, 1, 2, 3]
    return np.array([entry["embedding"] for entry in answer["data"]])


def test_vectors_are_those_of_python(embedder):
    server, vectors = embedder
    for model in ("base", "embedding"):
        np.testing.assert_allclose(embedded(server, model=model), vectors[model], atol=2e-5)
    own = embedded(server, model="embedding", prompt_name="query")
    np.testing.assert_allclose(own, vectors["queries"], atol=2e-5)

    # how many texts share a batch depends on the time that earlier ones took
    prompted = embedded(server, model="base", prompt_name="query")
    written = embedded(server, [PROMPT + text for text in TEXTS], model="base")
    np.testing.assert_allclose(prompted, written, atol=2e-5)


def test_other_routes_say_what_is_served(embedder):
    rerank, complete = {"query": "a", "documents": ["b"]}, {"prompt": "a"}
    for path, body in (("rerank", rerank), ("completions", complete)):
        status, answer = embedder[0].json("POST", f"/v1/{path}", {"model": "base", **body})
        assert status == 400 and "/v1/embeddings" in answer["error"]["message"]


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reranker")
    base = load_base(write_reranker(folder / "base"))
    scores = {"base": base.rerank(QUERY, TEXTS)}
    pack = pack_for(base, folder / "packs", "rerank", instruction="Find the same question")
    with base.applied(pack):
        scores["rerank"] = base.rerank(QUERY, TEXTS)

    with serving(Reranker(base, 3, 100), folder / "packs") as running:
        yield running, scores


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


@pytest.fixture(scope="module")
def heads(tmp_path_factory) -> tuple[Path, dict[str, Pack]]:
    """A base, two packs with heads of their own, one of the LM head, and an embedder."""
    out = tmp_path_factory.mktemp("heads")
    folder = write_reranker(out / "base")
    base = load_base(folder)
    packs = {"lm": pack_for(base, out, "rerank"), "vectors": pack_for(base, out, "embedding")}

    rankings = str(write_pairs(out / "rankings", all_rankings(1)[:24], 8))
    settings = {"task": "rerank", "head": "score", "iters": 1, "batch_size": 2, "val_batches": 0}
    for seed, name in enumerate(("one", "other"), 1):
        train = TrainConfig(**settings, learning_rate=1e-2, seed=seed)
        packs[name] = train_pack(folder, rankings, LoRAConfig(rank=2), train, out / name).pack
    return folder, packs


def test_each_document_is_scored_by_the_head_of_its_pack(heads):
    folder, packs = heads
    base = load_base(folder)
    rows = rerank_rows(base, QUERY, TEXTS, None, base.text_limit)
    names = ["one", "base", "other", "lm"]

    with started(Reranker(load_base(folder), 16, 64)) as worker:
        for name in ("one", "other", "lm"):
            worker.call(partial(worker.registry.add, name, packs[name])).result()
        ready = worker.call(lambda: [worker.submit(name, rows) for name in names])  # of one batch
        scores = [future.result(60) for future in ready.result()]

        with raises("unsupported", None, "embedder", "packs eval"):
            worker.call(lambda: worker.registry.add("v", packs["vectors"])).result()

    for name, own in zip(names, scores, strict=True):
        with nullcontext() if name == "base" else base.applied(packs[name]):
            expected = base.rerank(QUERY, TEXTS)
        assert np.abs(1 / (1 + np.exp(-own)) - expected).max() < 2e-5
    assert len({own.tobytes() for own in scores}) == len(names)

    embedder = EmbeddingWorker(load_base(folder), 4, 64)
    with raises("unsupported", None, "reranker", "/v1/rerank"):
        embedder.registry.add("one", packs["one"])
