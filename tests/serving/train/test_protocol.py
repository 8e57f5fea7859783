"""Requests and results of the protocol: sent again, waited for, rejected, and at the end."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path

import pytest

from mlx_packs.serving.train import results, service
from tests.helpers.serving import SECONDS, Running
from tests.helpers.tinker import PROTO, TinkerClient, forward_request, sample_body
from tests.serving.train.conftest import Training


def test_a_request_that_is_sent_again_is_computed_once(client, datum):
    model = client.create()
    body = forward_request(model, [datum], seq_id=1)
    answers = [
        client.server.request("POST", "/api/v1/forward_backward", body, PROTO)[2] for _ in range(2)
    ]
    assert answers[0] == answers[1]
    client.result(json.loads(answers[0]))
    once = client.step(model)["metrics"]["grad_norm"]

    twin = client.create()
    client.forward(twin, [datum])
    assert client.step(twin)["metrics"]["grad_norm"] == once


def test_results_that_are_not_there(client, hold, monkeypatch):
    client.post("retrieve_future", {"request_id": "x"}, 410)
    client.server.request("POST", "/api/v1/cancel_future", {"request_id": "x"})

    model = client.create()
    monkeypatch.setattr(service, "_POLL_SECONDS", 0.01)
    with hold():
        answer = client.post("save_weights", {"model_id": model, "path": "a"})
        pending = client.post("retrieve_future", {"request_id": answer["request_id"]}, 408)
    assert pending["type"] == "try_again"


def test_a_full_queue(client, monkeypatch):
    monkeypatch.setattr("mlx_packs.serving.train.results.Results.running", 64)
    answer = client.post("asample", sample_body(client.session_on()), 429)
    assert answer["error"]["code"] == "busy"


def test_requests_while_the_server_ends(client, server, hold, monkeypatch):
    """They have some time; then their result is an error, and others are not taken."""
    monkeypatch.setattr(results, "_LAST_SECONDS", SECONDS)
    model = client.create()
    with hold(), ThreadPoolExecutor(1) as pool:
        bodies = [{"model_id": model, "path": name} for name in "abc"]
        polled, later = (client.post("save_weights", body) for body in bodies[:2])
        poll = pool.submit(client.result, polled)
        ending = asyncio.run_coroutine_threadsafe(server.training.results.end(0.1), server.loop)
        error = poll.result()
        assert error["category"] == "server" and "is shutting down" in error["error"]
        with pytest.raises(FutureTimeoutError):
            ending.result(0.3)  # the other result is not fetched yet

        assert client.result(later) == error
        ending.result()
        rejection = client.post("save_weights", bodies[2], 410)
        assert rejection["error"]["code"] == "interrupted"


def test_results_that_nobody_fetches_do_not_hold_up_the_end(client, server, monkeypatch):
    monkeypatch.setattr(results, "_LAST_SECONDS", 0.1)
    client.post("asample", sample_body(client.session_on()))
    end = server.training.results.end(SECONDS)
    asyncio.run_coroutine_threadsafe(end, server.loop).result(SECONDS / 2)


def test_limits_of_bodies(server):
    status, answer = server.json("POST", "/api/v1/client/config", {"sdk_version": "0"})
    assert answer["fwdbwd_max_chunk_bytes_count"] == 5_000_000
    assert answer["fwdbwd_max_chunk_len"] == 65_536
    path = "/api/v1/forward_backward"
    assert server.request("POST", path, b"x" * 10_000_001, PROTO)[0] == 413
    assert server.request("POST", path, {})[0] == 415
    assert server.request("POST", "/api/v1/create_session", b"x", PROTO)[0] == 415


def test_a_server_without_training_has_no_such_routes(generator):
    with Running(generator) as server:
        assert server.json("GET", "/api/v1/healthz")[0] == 404


@pytest.mark.parametrize(
    ("folder", "host", "name"),
    [
        ("/models/a/b", "127.0.0.1", "/models/a/b"),
        ("/models/b", "127.0.0.1", "/models/b/."),
        ("/models/a:b", "127.0.0.1", "tiny"),
        ("/models/a/b", "0.0.0.0", "tiny"),
    ],
)
def test_every_client_has_a_name_that_opens_the_tokenizer(
    generator, tmp_path, monkeypatch, folder, host, name
):
    with Training(generator, tmp_path, host=host) as server:
        client = TinkerClient(server)
        session, model_id = client.session_on(), client.create()
        monkeypatch.setattr(generator.base, "path", Path(folder))

        info = client.post("get_info", {"model_id": model_id})["model_data"]
        _, sampler = server.json("GET", f"/api/v1/samplers/{session}")
        (model,) = server.json("GET", "/api/v1/get_server_capabilities")[1]["supported_models"]
        names = {info["model_name"], info["tokenizer_id"], sampler["base_model"]}
        assert names | {model["model_name"]} == {name}

        body = {"session_id": client.session, "base_model": name}
        assert client.post("create_sampling_session", body)["sampling_session_id"]
