"""Samples over HTTP: of the base, of models in training and of saved ones."""

import shutil

import numpy as np
import pytest

from mlx_packs.errors import PackError
from tests.helpers.tinker import TinkerClient, likelihoods, sample_body
from tests.serving.train.conftest import Training


def test_reinforcement_losses_of_samples(client, generator, tokens):
    """Samples have the log-probabilities of the forward pass, so that ratios start at 1."""
    model = client.create()
    session = client.call("save_weights_for_sampler", {"model_id": model})["sampling_session_id"]
    response = client.sample(session, tokens[:6], params={"temperature": 1.0, "seed": 5})
    (sequence,) = response.sequences
    sampled = np.frombuffer(sequence.tokens, np.int32).tolist()
    logprobs = np.frombuffer(sequence.logprobs, np.float32)

    row = tokens[:6] + sampled[:-1]
    inputs = {"target_tokens": tokens[1:6] + sampled, "logprobs": [0.0] * 5 + logprobs.tolist()}
    inputs |= {"advantages": [0.0] * 5 + [1.0] * len(sampled)}
    for loss in ("importance_sampling", "ppo"):
        value, (scores,) = client.forward(model, [(row, inputs)], loss)
        assert value == pytest.approx(-len(sampled), rel=1e-3)
        np.testing.assert_allclose(scores[5:], logprobs, atol=2e-3)


def test_samples(client, generator, tokens):
    session = client.session_on()
    params = {"max_tokens": 4}
    response = client.sample(session, tokens[:8], 2, params=params, prompt_logprobs=True)
    assert [each.stop_reason for each in response.sequences] == [1, 1]
    first, second = (np.frombuffer(each.tokens, np.int32) for each in response.sequences)
    assert first.tolist() == second.tolist() and len(first) == 4

    scores = np.frombuffer(response.prompt_logprobs, np.float32)
    assert np.isnan(scores[0])
    actual = generator.call(lambda: likelihoods(generator.base, tokens[:8])).result()
    np.testing.assert_allclose(scores[1:], actual, atol=2e-3)


def test_the_token_that_ends_a_sequence_is_part_of_it(client, tokens):
    session = client.session_on()
    free = client.sample(session, tokens[:6], params={"max_tokens": 6, "stop": []})
    first = np.frombuffer(free.sequences[0].tokens, np.int32).tolist()
    stopped = client.sample(session, tokens[:6], params={"max_tokens": 6, "stop": [first[2]]})
    (sequence,) = stopped.sequences
    ended = first[: first.index(first[2]) + 1]
    assert np.frombuffer(sequence.tokens, np.int32).tolist() == ended
    assert len(np.frombuffer(sequence.logprobs, np.float32)) == len(ended)
    assert sequence.stop_reason == 0


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"prompt": {"chunks": [{"tokens": [10**6]}]}}, "prompt"),
        ({"prompt": {"chunks": [{"tokens": [5] * 2048}]}, "prompt_logprobs": True}, "prompt"),
        ({"sampling_params": {"max_tokens": 2043}}, "prompt"),
        ({"num_samples": 65}, "num_samples"),
        ({"prompt_logprobs_last_n": 2}, "prompt_logprobs_last_n"),
        ({"sampling_params": {"temperature": -1.0}}, "sampling_params.temperature"),
    ],
)
def test_faulty_samples(client, tokens, fields, where):
    body = {"prompt": {"chunks": [{"tokens": tokens[:6]}]}, "sampling_params": {}}
    body |= {"sampling_session_id": client.session_on(), **fields}
    assert client.post("asample", body, 400)["error"]["param"] == where


def score(client, session: str, datum) -> float:
    response = client.sample(session, datum[0], prompt_logprobs=True)
    return float(np.nansum(np.frombuffer(response.prompt_logprobs, np.float32)))


def test_a_step_of_a_model(client, datum):
    model = client.create()
    body = {"model_id": model, "sampling_session_seq_id": 0}
    session = client.call("save_weights_for_sampler", body)["sampling_session_id"]
    before = score(client, session, datum)
    client.forward(model, [datum])
    client.step(model, learning_rate=1e-2)
    assert score(client, session, datum) == before

    client.call("unload_model", {"model_id": model})
    assert client.server.worker.registry.names == ["base"]
    answer = client.post("asample", sample_body(session))
    assert "is not served" in client.result(answer)["error"]


def test_the_oldest_saved_models_leave_memory(client, server, datum, monkeypatch):
    monkeypatch.setattr("mlx_packs.serving.train.sampling._MOST_LOADED", 1)
    model = client.create()
    sessions = []
    for name in ("a", "b"):
        path = client.call("save_weights_for_sampler", {"model_id": model, "path": name})["path"]
        sessions.append(client.session_on(path))
    assert len(server.worker.registry.names) == 2
    assert "is not served" in client.call("asample", sample_body(sessions[0]))["error"]
    assert client.sample(sessions[1], datum[0]).sequences
    status, answer = client.server.json("GET", f"/api/v1/samplers/{sessions[0]}")
    assert status == 200 and answer["model_path"].endswith("/sampler_weights/a")

    for number in (1, 2):  # steps of a model, too
        body = {"model_id": model, "sampling_session_seq_id": number}
        client.call("save_weights_for_sampler", body)
    assert server.worker.registry.names[2:] == [f"tinker/{model.replace(':', '-')}/step-2"]


def test_a_new_session_is_on_what_is_saved_now(client, datum):
    model = client.create()
    body = {"model_id": model, "path": "mine", "overwrite": True}
    path = client.call("save_weights", body)["path"]
    before = score(client, client.session_on(path), datum)
    client.forward(model, [datum])
    client.step(model, learning_rate=1e-2)
    client.call("save_weights", body)
    assert score(client, client.session_on(path), datum) > before + 1

    assert path.replace("tinker://", "tinker/") in client.server.worker.registry.names
    shutil.rmtree(client.server.folder / path.removeprefix("tinker://"))
    body = {"session_id": client.session, "model_path": path}
    error = client.post("create_sampling_session", body, 404)["error"]
    assert "nothing is saved" in error["message"]


def test_samples_that_find_no_place_in_time(generator, tmp_path, monkeypatch):
    def full(_):
        raise PackError("The queue is full.", "busy")

    monkeypatch.setattr(generator, "_check", full)
    with Training(generator, tmp_path, request_seconds=0.3) as server:
        client = TinkerClient(server)
        answer = client.call("asample", sample_body(client.session_on()))
    assert "queue is full" in answer["error"]


def test_a_client_that_leaves_a_sample(client, server):
    answer = client.post("asample", sample_body(client.session_on()) | {"num_samples": 4})
    server.request("POST", "/api/v1/cancel_future", {"request_id": answer["request_id"]})
    assert client.sample(client.session_on(), [1, 2]).sequences
