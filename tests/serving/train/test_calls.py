"""Forward passes of several clients that wait at once, and what one does not do to the others."""

import json
from contextlib import contextmanager

import pytest

from mlx_packs.serving.train import models as models_module
from tests.helpers.serving import until
from tests.helpers.tinker import ADAM, MESSAGES, PROTO, TinkerClient, forward_request


@pytest.fixture
def other(server):
    return TinkerClient(server)


@pytest.fixture
def at_once(server, hold):
    """Compute nothing until a number of requests wait for their passes."""

    @contextmanager
    def waiting(count: int):
        with hold():
            yield
            until(lambda: server.training.load["waiting"] == count)

    return waiting


@pytest.fixture
def limit(monkeypatch):
    return lambda inputs: monkeypatch.setattr(models_module, "MOST_INPUTS", inputs)


@pytest.fixture
def computed(server, monkeypatch):
    """The id of the model of every pass, with its inputs, as they are computed."""
    models = server.training._models
    run = models._trainer.run
    seen = []

    def noted(trained, rows, loss, backward):
        (name,) = [model.id for model in models.all if model is trained]
        seen.append((name, len(rows) * max(row.size for row in rows)))
        return run(trained, rows, loss, backward)

    monkeypatch.setattr(models._trainer, "run", noted)
    return seen


def sent(client, model: str, data: list, *args, **options) -> dict:
    body = forward_request(model, data, *args, **options)
    status, _, content = client.server.request("POST", "/api/v1/forward_backward", body, PROTO)
    assert status == 200
    return json.loads(content)


def loss_of(client, answer: dict) -> float:
    result = client.result(answer)
    assert isinstance(result, bytes), result
    return MESSAGES.ForwardBackwardOutput.FromString(result).metrics[0].value


def shorter(datum, length: int):
    return datum[0][:length], {name: values[:length] for name, values in datum[1].items()}


def test_the_passes_of_several_models_take_turns(client, other, datum, computed, limit, at_once):
    """No pass has more inputs than the limit, and a short request does not wait for a long one."""
    limit(32)
    long = client.create()
    short = other.create()
    rows = [shorter(datum, 8)] * 12
    with at_once(2):
        answer = sent(client, long, rows)
        until(lambda: client.server.training.load["waiting"] == 1)
        quick = sent(other, short, rows[:2], forward_only=True)
    assert loss_of(client, answer) == pytest.approx(6 * loss_of(other, quick), rel=1e-5)

    assert [model for model, _ in computed] == [long, short, long, long]
    assert all(inputs <= 32 for _, inputs in computed)


def test_passes_and_requests_add_up(client, datum, limit):
    """Loss, log-probabilities by row and gradient are those of one pass, up to rounding."""
    rows = [shorter(datum, length) for length in (3, 8, 5)]

    def results(*parts: list) -> tuple:
        model = client.create(seed=1)
        losses, logprobs = zip(*(client.forward(model, part) for part in parts), strict=True)
        return sum(losses), sum(logprobs, []), client.step(model)["metrics"]["grad_norm"]

    loss, logprobs, norm = results(rows)
    requests = results(rows[:1], rows[1:])
    limit(8)
    for split_loss, split_logprobs, split_norm in (requests, results(rows)):
        assert split_loss == pytest.approx(loss, rel=1e-5)
        assert split_norm == pytest.approx(norm, rel=1e-5)
        for split, whole in zip(split_logprobs, logprobs, strict=True):
            assert split == pytest.approx(whole, rel=1e-4)


def test_requests_of_one_model_stay_in_order(client, datum, at_once):
    model = client.create(seed=1)
    first = client.forward(model, [datum])[0]
    client.step(model)
    second = client.forward(model, [datum])[0]

    model = client.create(seed=1)
    with at_once(1):
        answers = [sent(client, model, [datum])]
        update = client.post("optim_step", {"model_id": model, "adam_params": ADAM})
        answers.append(sent(client, model, [datum]))
    values = [loss_of(client, answer) for answer in answers]
    assert "error" not in client.result(update)
    assert values == pytest.approx([first, second], rel=1e-5) and second < first


def test_an_error_is_of_its_own_request(client, other, datum, at_once):
    models = [client.create(seed=seed) for seed in range(4)]
    theirs = other.create()
    huge = datum[0], {**datum[1], "weights": [3e38] * len(datum[0])}
    with at_once(3):
        faulty = {
            "data[1]": sent(client, models[0], [datum, (datum[0], {"target_tokens": [1]})]),
            "'unknown'": sent(client, models[1], [datum], "unknown"),
            "not finite": sent(client, models[2], [huge]),
        }
        last = sent(client, models[3], [datum])
        until(lambda: client.server.training.load["waiting"] == 2)
        unloaded = client.post("unload_model", {"model_id": models[3]})
        faulty["is not loaded"] = sent(client, models[3], [datum])
        good = sent(other, theirs, [datum])

    assert loss_of(other, good) > 0 and loss_of(client, last) > 0
    assert other.step(theirs)["metrics"]["grad_norm"] > 0
    for message, answer in faulty.items():
        result = client.result(answer)
        assert message in result["error"] and result["category"] == "user"
    assert "error" not in client.result(unloaded)
    assert "no gradient" in client.step(models[2])["error"]


def test_chats_are_answered_between_passes(client, server, datum, computed, limit, at_once):
    limit(16)
    model = client.create()
    with at_once(1):
        answer = sent(client, model, [datum] * 24)
    assert server.chat("base", "Hi", max_tokens=4)["choices"]
    assert len(computed) < 24
    assert loss_of(client, answer) > 0 and len(computed) == 24


def test_a_request_that_is_cancelled_leaves_the_others(client, other, server, datum, at_once):
    mine = client.create()
    theirs = other.create()
    with at_once(1):
        gone = sent(client, mine, [datum])
        stays = sent(other, theirs, [datum])
        until(lambda: server.training.load["waiting"] == 2)
        server.request("POST", "/api/v1/cancel_future", {"request_id": gone["request_id"]})
    assert loss_of(other, stays) > 0
    assert server.training.load["passes"] == 1
    assert "no gradient" in client.step(mine)["error"]
