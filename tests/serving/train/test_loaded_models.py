"""Which models are in memory: how they are made and unloaded."""

from tests.helpers.tinker import ADAM, PROTO, forward_request


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


def test_models_that_are_made_at_once_are_not_too_many(client, hold):
    body = {"session_id": client.session, "base_model": "base", "lora_config": {"rank": 4}}
    with hold():
        answers = [client.post("create_model", body | {"model_seq_id": i}) for i in range(10)]
    results = [client.result(answer) for answer in answers]
    assert ["error" in each for each in results] == [False] * 8 + [True] * 2
    assert "is the most" in results[-1]["error"]


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
