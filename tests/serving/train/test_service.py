"""Models trained over HTTP, by requests of a small client."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from mlx_packs.adapters.attach import attach
from mlx_packs.config.lora import LoRAConfig
from tests.helpers.tinker import ADAM, TinkerClient, likelihoods


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


def test_gradients_of_several_requests_add_up(client, datum):
    rows = [datum, (datum[0][:5], {name: values[:5] for name, values in datum[1].items()})]
    norms = []
    for parts in ([rows], [rows[:1], rows[1:]]):
        model = client.create()
        for part in parts:
            client.forward(model, part)
        norms.append(client.step(model)["metrics"]["grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


def test_settings_of_an_update(client, datum):
    model = client.create()
    client.forward(model, [datum])
    client.step(model, learning_rate=0.0, grad_clip_norm=1.0)
    loss, _ = client.forward(model, [datum], forward_only=True)
    assert loss == client.forward(model, [datum], forward_only=True)[0]
    for faulty in ({"beta1": 1.0}, {"learning_rate": -1}, {"beta3": 0.1}, {"eps": "a"}):
        client.post("optim_step", {"model_id": model, "adam_params": ADAM | faulty}, 400)


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
