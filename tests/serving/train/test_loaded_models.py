"""Which models are in memory: how they are made, make room for others and are unloaded."""

import threading

from mlx_packs.serving.train import models, service
from tests.helpers.serving import SECONDS, until
from tests.helpers.tinker import ADAM, PROTO, TinkerClient, forward_request


def test_models_that_are_not_there(client, datum):
    model = client.create()
    client.call("unload_model", {"model_id": model})
    for path in ("optim_step", "save_weights", "get_info", "unload_model"):
        body = {"model_id": model} | ({"adam_params": ADAM} if path == "optim_step" else {})
        assert client.post(path, body, 404)["error"]["param"] == "model_id"
    body = forward_request(model, [datum])
    assert client.server.request("POST", "/api/v1/forward_backward", body, PROTO)[0] == 404


def test_requests_that_make_no_model(client):
    body = {"session_id": client.session, "model_seq_id": 0, "base_model": "other"}
    assert client.post("create_model", body, 404)["error"]["param"] == "base_model"
    body["base_model"] = "base"
    client.post("create_model", body | {"session_id": "x"}, 404)
    client.post("create_model", body | {"optimizer_config": {"type": "dimuon"}}, 400)
    client.post("create_model", body | {"lora_config": {"rank": 0}}, 400)
    client.post("load_weights", {"path": "tinker://a/weights/b", "optimizer": True}, 400)
    for layers in ("train_attn", "train_mlp"):
        error = client.post("create_model", body | {"lora_config": {layers: False}}, 400)["error"]
        assert error["message"] == f"lora_config.{layers}: must be True."

    answer = client.call("create_model", body | {"lora_config": {"rank": 4096}})
    assert "--rank 4096" in answer["error"] and answer["category"] == "user"


def test_models_of_clients_that_have_gone_are_saved_for_others(client, monkeypatch):
    monkeypatch.setattr(models, "MOST_MODELS", 1)
    client.create()
    body = {"session_id": client.session, "model_seq_id": 5, "base_model": "base"}
    assert "is the most" in client.call("create_model", body)["error"]

    monkeypatch.setattr(service, "_SILENT_SECONDS", 0.0)
    other = TinkerClient(client.server)
    other.create()
    assert list(client.server.folder.glob(f"{client.session}-train-0/weights/unloaded/pack.json"))


def test_clients_that_make_room_at_once_do_not_unload_a_model_twice(client, server, monkeypatch):
    """The third comes while the second saves what the first is about to unload."""
    monkeypatch.setattr(models, "MOST_MODELS", 1)
    client.create()
    server.training._sessions[client.session] = float("-inf")
    other = TinkerClient(server)
    body = {"session_id": other.session, "base_model": "base", "lora_config": {"rank": 4}}
    before_the_first_is_saved, before_the_second = threading.Event(), threading.Event()

    def make(number: int) -> dict:
        return other.post("create_model", body | {"model_seq_id": number})

    server.worker.post(lambda: before_the_first_is_saved.wait(SECONDS))
    answers = [make(0)]
    until(lambda: server.worker._commands.qsize() == 1)
    server.worker.post(lambda: before_the_second.wait(SECONDS))
    answers.append(make(1))
    before_the_first_is_saved.set()
    until(lambda: list(server.folder.glob("*/weights/unloaded/pack.json")))
    answers.append(make(2))
    before_the_second.set()

    first, *others = [other.result(answer) for answer in answers]
    assert "error" not in first
    assert ["is the most" in each["error"] for each in others] == [True, True]


def test_models_that_are_made_at_once_are_not_too_many(client, hold):
    body = {"session_id": client.session, "base_model": "base", "lora_config": {"rank": 4}}
    with hold():
        answers = [client.post("create_model", body | {"model_seq_id": i}) for i in range(10)]
    results = [client.result(answer) for answer in answers]
    assert ["error" in each for each in results] == [False] * 8 + [True] * 2


def test_an_unload_finds_the_step_that_is_copied(client, server, hold):
    body = {"model_id": client.create()}
    with hold():
        answers = [client.post(p, body) for p in ("save_weights_for_sampler", "unload_model")]
    for answer in answers:
        assert "error" not in client.result(answer)
    assert server.worker.registry.names == ["base"]


def test_the_end_of_a_session(client):
    model = client.create()
    client.post("session_heartbeat", {"session_id": client.session})
    client.post(f"sessions/{client.session}/finish", {"status": "success"})
    client.post("get_info", {"model_id": model}, 404)
    client.post("session_heartbeat", {"session_id": client.session}, 410)
