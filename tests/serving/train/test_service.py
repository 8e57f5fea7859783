"""Models trained over HTTP, by requests of a small client."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from mlx_packs.adapters.attach import attach
from mlx_packs.config.lora import LoRAConfig
from tests.helpers.tinker import ADAM, PROTO, TinkerClient, forward_request, likelihoods


def test_a_model_learns_and_the_base_stays(client, generator, tokens, datum):
    before = generator.call(lambda: likelihoods(generator.base, tokens)).result()
    model = client.create()
    loss, (logprobs,) = client.forward(model, [datum])
    np.testing.assert_allclose(logprobs, before, atol=2e-3)
    assert loss == pytest.approx(-logprobs.sum(), rel=1e-5)

    losses = [loss]
    for _ in range(3):
        client.step(model, learning_rate=5e-3)
        losses.append(client.forward(model, [datum])[0])
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.9 * losses[0]
    for faulty in ({"beta1": 1.0}, {"learning_rate": -1}, {"beta3": 0.1}, {"eps": "a"}):
        client.post("optim_step", {"model_id": model, "adam_params": ADAM | faulty}, 400)

    after = generator.call(lambda: likelihoods(generator.base, tokens)).result()
    np.testing.assert_array_equal(after, before)


def test_an_update_is_that_of_torch_adamw(client, generator, datum):
    """Of B, which begins as zero, so that its first update is -rate sign(gradient)."""
    model = client.create(seed=3)
    client.forward(model, [datum])
    assert client.step(model, learning_rate=1e-3)["metrics"]["grad_norm"] > 0

    trained = client.server.training._models.find(model).attached.tensors()
    values = np.array(trained["model.layers.0.self_attn.q_proj.lora_b"])
    np.testing.assert_allclose(np.abs(values[values != 0]), 1e-3, rtol=1e-4)

    name = "model.layers.0.self_attn.q_proj.lora_a"

    def fresh() -> np.ndarray:  # what `packs train` begins with
        with generator.registry.slots.lifted():
            attached = attach(generator.base, LoRAConfig(rank=4), seed=3)
            tensor = np.array(attached.tensors()[name])
            attached.detach()
        return tensor

    np.testing.assert_array_equal(np.array(trained[name]), generator.call(fresh).result())


def test_two_models_do_not_mix(client, datum):
    """Trained by two sessions at once, each is what it is alone, up to rounding."""
    other = TinkerClient(client.server)
    reversed_datum = datum[0][::-1], {**datum[1], "target_tokens": datum[1]["target_tokens"][::-1]}

    def train(each: TinkerClient, row) -> list[float]:
        model = each.create(seed=1)
        losses = []
        for _ in range(3):
            losses.append(each.forward(model, [row])[0])
            each.step(model)
        return losses

    alone = [train(client, datum), train(client, reversed_datum)]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(train, (client, other), (datum, reversed_datum)))
    assert together == [pytest.approx(losses, rel=1e-5) for losses in alone]


def test_a_failed_step_is_an_error_of_the_server(client, datum, monkeypatch):
    model, base = client.create(), client.server.worker.base.model
    assert client.forward(model, [])[0].startswith("data: ")
    names = [name for name, _ in base.named_modules()]
    with monkeypatch.context() as patch:
        patch.setattr("mlx_packs.serving.train.losses.target_logprobs", lambda *_, **__: 1 / 0)
        message, category = client.forward(model, [datum])
    assert category == "server" and "log" in message
    assert "no gradient" in client.step(model)["error"]
    assert [name for name, _ in base.named_modules()] == names and not base.training
    assert client.forward(model, [datum])[0] > 0
    assert client.server.chat("base", "Hi")["choices"]


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
