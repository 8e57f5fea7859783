"""Embeddings and ranks over HTTP: each text with its own pack, as Python has them."""

import base64
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from mlx_packs import LoRAConfig, Pack, TrainConfig, load_base, train_pack
from mlx_packs.bases.tokenizer import tokens_of
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
PATH = "/v1/embeddings"


def pack_for(base, task: str, seed: int = 1, **objective: str) -> Pack:
    facts = {"objective": {"task": task, **objective}}
    return random_pack(base, seed, 2 + seed, (), size=0.3, facts=facts)


@pytest.fixture(scope="module", params=["encoder", "decoder"])
def served(request, encoder, tmp_path_factory):
    """A server of a base that embeds and of two packs, and the vectors of the texts by model."""
    folder = tmp_path_factory.mktemp(request.param)
    model = encoder if request.param == "encoder" else write_embedder(folder / "base")
    base = load_base(model)
    vectors = {"base": np.array(base.encode(TEXTS))}
    for seed, name in enumerate(("one", "two")):
        pack = pack_for(base, "embedding", seed, query_prompt="Q: ").save(folder / "packs" / name)
        with base.applied(pack):
            vectors[name] = np.array(base.encode(TEXTS))
            vectors[f"{name} query"] = np.array(base.encode(TEXTS, prompt_name="query"))
        assert np.abs(vectors[name] - vectors["base"]).max() > 0.01

    with serving(EmbeddingWorker(load_base(model), 5, 100), folder / "packs") as running:
        yield running, vectors


def embed(server, model: str, **fields) -> tuple[int, dict]:
    return server.json("POST", PATH, {"model": model, "input": TEXTS, **fields})


def embedded(server, model: str, **fields) -> np.ndarray:
    status, answer = embed(server, model, **fields)
    assert status == 200 and [entry["index"] for entry in answer["data"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 10
    return np.array([entry["embedding"] for entry in answer["data"]])


@pytest.mark.parametrize("model", ["base", "one", "two"])
def test_vectors_are_those_of_the_base_with_the_pack(served, model):
    server, expected = served
    vectors = embedded(server, model)
    np.testing.assert_allclose(vectors, expected[model], atol=2e-5)
    _, coded = embed(server, model, encoding_format="base64", dimensions=vectors.shape[1])
    decoded = [np.frombuffer(base64.b64decode(e["embedding"]), "<f4") for e in coded["data"]]
    np.testing.assert_allclose(decoded, vectors, atol=2e-5)
    _, single = embed(server, model, input=TEXTS[0])
    np.testing.assert_allclose(single["data"][0]["embedding"], vectors[0], atol=2e-5)


def test_prompts_are_those_of_the_pack_or_of_the_base(served):
    server, expected = served
    own = embedded(server, "one", prompt_name="query")
    np.testing.assert_allclose(own, expected["one query"], atol=2e-5)
    if server.worker.base.architecture == "decoder":  # whose base has a prompt
        # how many texts share a batch depends on the time that earlier ones took
        prompted = embedded(server, "base", prompt_name="query")
        written = embedded(server, "base", input=[PROMPT + text for text in TEXTS])
        np.testing.assert_allclose(prompted, written, atol=2e-5)


def test_texts_of_different_packs_share_a_batch(served):
    server, expected = served
    worker, embedder = server.worker, server.worker.base.embedder
    rows = tokens_of(embedder.tokenizer, TEXTS, embedder.vectors.longest)
    models = ("one", "base", "two", "one")
    before = worker.steps
    futures = worker.call(lambda: [worker.submit(model, rows) for model in models]).result()
    for future, model in zip(futures, models, strict=True):
        np.testing.assert_allclose(future.result(60), expected[model], atol=2e-5)
    assert worker.steps - before <= 5  # 16 texts, 5 at a time


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "other"}, 404, "model"),
        ({"input": []}, 400, "input"),
        ({"input": ["a", ""]}, 400, "input.1"),
        ({"input": ["a"] * 2049}, 400, "input"),
        ({"input": [[1, 2]]}, 400, None),
        ({"dimensions": 7}, 400, "dimensions"),
        ({"encoding_format": "hex"}, 400, "encoding_format"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_wrong_requests(served, fields, status, param):
    code, answer = served[0].json("POST", PATH, {"model": "base", "input": "a", **fields})
    assert code == status and param in (None, answer["error"]["param"])


def test_a_base_that_embeds_has_no_texts_and_others_no_embeddings(served, shared_server):
    rerank, complete = {"query": "a", "documents": ["b"]}, {"prompt": "a"}
    for path, body in (("rerank", rerank), ("completions", complete)):
        status, answer = served[0].json("POST", f"/v1/{path}", {"model": "base", **body})
        assert status == 400 and PATH in answer["error"]["message"]
    assert shared_server.json("POST", PATH, {"model": "base", "input": "a"})[0] == 400


def test_it_counts_and_lists_as_a_server_of_texts(served):
    server, _ = served
    assert {m["id"] for m in server.json("GET", "/v1/models")[1]["data"]} == {"base", "one", "two"}
    packs = server.json("GET", "/v1/packs")[1]
    assert packs["architecture"] == server.worker.base.architecture and len(packs["data"]) == 2
    assert server.json("GET", "/health")[1]["status"] == "ok"


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reranker")
    base = load_base(write_reranker(folder / "base"))
    scores = {"base": base.rerank(QUERY, TEXTS)}
    pack = pack_for(base, "rerank", instruction="Find the same question")
    pack.save(folder / "packs" / "rerank")
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
        ({"query": " "}, 400, "query"),
        ({"top_n": 0}, 400, "top_n"),
    ],
)
def test_requests_that_cannot_be_answered_say_why(reranker, fields, status, param):
    body = {"model": "base", "query": QUERY, "documents": TEXTS} | fields
    actual, answer = reranker[0].json("POST", "/v1/rerank", body)
    assert (actual, answer["error"]["param"]) == (status, param)


def test_server_does_what_its_packs_and_base_are_made_for(served, reranker, tiny):
    embeds = served[0].worker.base
    packs = dict(served[0].worker.registry.packs)
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
    packs = {"lm": pack_for(base, "rerank"), "vectors": pack_for(base, "embedding")}

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
