"""Embeddings over HTTP: each text with its own pack, as `Base.encode` has them."""

import base64

import numpy as np
import pytest

from mlx_packs import load_base
from mlx_packs.serving.embedding import EmbeddingWorker
from tests.helpers.packs import random_pack
from tests.serving.conftest import serving

TEXTS = ["how do i fix a car?", "steps to repair the vehicle", "paint " * 60, "a"]
PATH = "/v1/embeddings"


@pytest.fixture(scope="module")
def expected(encoder, tmp_path_factory):
    """A folder of packs, and the vectors of the texts by base and pack."""
    folder = tmp_path_factory.mktemp("encoders")
    base = load_base(encoder)
    vectors = {"base": np.array(base.encode(TEXTS))}
    for seed, name in enumerate(("one", "two")):
        random_pack(base, seed, 2 + seed, (), size=0.3).save(folder / name)
        with base.applied(folder / name):
            vectors[name] = np.array(base.encode(TEXTS))
        assert np.abs(vectors[name] - vectors["base"]).max() > 0.01
    return folder, vectors


@pytest.fixture(scope="module")
def server(encoder, expected):
    with serving(EmbeddingWorker(load_base(encoder), 5, 100), expected[0]) as running:
        yield running


def embed(server, model: str, **fields) -> tuple[int, dict]:
    return server.json("POST", PATH, {"model": model, "input": TEXTS, **fields})


@pytest.mark.parametrize("model", ["base", "one", "two"])
def test_vectors_are_those_of_the_base_with_the_pack(server, expected, model):
    status, answer = embed(server, model)
    assert status == 200 and [entry["index"] for entry in answer["data"]] == [0, 1, 2, 3]
    vectors = np.array([entry["embedding"] for entry in answer["data"]])
    np.testing.assert_allclose(vectors, expected[1][model], atol=2e-5)
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 10
    _, coded = embed(server, model, encoding_format="base64", dimensions=vectors.shape[1])
    decoded = [np.frombuffer(base64.b64decode(e["embedding"]), "<f4") for e in coded["data"]]
    np.testing.assert_allclose(decoded, vectors, atol=2e-5)
    _, single = embed(server, model, input=TEXTS[0])
    np.testing.assert_allclose(single["data"][0]["embedding"], vectors[0], atol=2e-5)


def test_texts_of_different_packs_share_a_batch(server, expected):
    worker = server.worker
    encoded = worker.base.tokenizer(TEXTS, truncation=True, max_length=48).input_ids
    rows, models = [np.array(row) for row in encoded], ("one", "base", "two", "one")
    before = worker.steps
    futures = worker.call(lambda: [worker.submit(model, rows) for model in models]).result()
    for future, model in zip(futures, models, strict=True):
        np.testing.assert_allclose(future.result(60), expected[1][model], atol=2e-5)
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
def test_wrong_requests(server, fields, status, param):
    code, answer = server.json("POST", PATH, {"model": "base", "input": "a", **fields})
    assert code == status and param in (None, answer["error"]["param"])


def test_an_encoder_has_no_texts_and_a_decoder_no_embeddings(server, shared_server):
    assert server.json("POST", "/v1/completions", {"model": "base", "prompt": "a"})[0] == 400
    assert shared_server.json("POST", PATH, {"model": "base", "input": "a"})[0] == 400


def test_an_encoder_counts_and_lists_as_a_decoder(server):
    assert {m["id"] for m in server.json("GET", "/v1/models")[1]["data"]} == {"base", "one", "two"}
    packs = server.json("GET", "/v1/packs")[1]
    assert packs["architecture"] == "encoder" and len(packs["data"]) == 2
    assert server.json("GET", "/health")[1]["status"] == "ok"
