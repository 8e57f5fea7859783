"""Calls of several clients that wait at once: one pass, and what one does not do to the others."""

import json
import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest

from mlx_packs.serving.train import calls, losses
from mlx_packs.serving.train import passes as passes_module
from tests.helpers.serving import SECONDS, until
from tests.helpers.tinker import ADAM, MESSAGES, PROTO, TinkerClient, forward_request

SAMPLED = "importance_sampling"


@pytest.fixture
def other(server):
    return TinkerClient(server)


@pytest.fixture
def sampled(datum):
    """The datum with what a loss of reinforcement learning reads."""
    tokens, inputs = datum
    count = len(tokens)
    targets = inputs["target_tokens"]
    return tokens, {
        "target_tokens": targets,
        "logprobs": [-3.0] * count,
        "advantages": [1.0] * count,
    }


@pytest.fixture
def passes(server):
    """How many models each pass had so far, by that number."""
    return server.training._models.queue.passes


@pytest.fixture
def wait(server):
    """Wait until so many calls wait for a pass."""
    queue = server.training._models.queue
    return lambda count: until(lambda: queue.waiting == count)


@pytest.fixture
def at_once(server, wait, monkeypatch):
    """Compute nothing until so many calls wait for a pass."""
    monkeypatch.setattr(calls, "_MOST_PATIENCE", 0.0)

    @contextmanager
    def waiting(count: int):
        came = threading.Event()
        busy = server.worker.call(lambda: came.wait(SECONDS))
        try:
            yield
            wait(count)
        finally:
            came.set()
            busy.result()

    return waiting


def sent(client, model: str, data: list, *args, **options) -> dict:
    """Send a request for a forward pass; return the answer that names it."""
    body = forward_request(model, data, *args, **options)
    status, _, content = client.server.request("POST", "/api/v1/forward_backward", body, PROTO)
    assert status == 200
    return json.loads(content)


def loss_of(client, answer: dict) -> float:
    result = client.result(answer)
    assert isinstance(result, bytes), result
    return MESSAGES["ForwardBackwardOutput"].FromString(result).metrics[0].value


def shorter(datum, length: int):
    return datum[0][:length], {name: values[:length] for name, values in datum[1].items()}


def test_calls_that_wait_at_once_are_one_pass(
    client, other, server, datum, sampled, passes, at_once
):
    """Each with its own loss and rank; both updates are those of the models alone."""
    given = [
        (client, 4, [datum, shorter(datum, 5)], "cross_entropy"),
        (other, 8, [shorter(sampled, 7)], SAMPLED),
    ]
    alone = []
    for each, rank, rows, loss in given:
        model = each.create(rank, seed=1)
        alone.append([each.forward(model, rows, loss)[0], each.step(model)["metrics"]["grad_norm"]])
    assert passes == {1: 2}

    models = [each.create(rank, seed=1) for each, rank, *_ in given]
    with at_once(2):
        answers = [
            sent(each, model, rows, loss)
            for model, (each, _, rows, loss) in zip(models, given, strict=True)
        ]
    together = [
        [loss_of(each, answer), each.step(model)["metrics"]["grad_norm"]]
        for answer, model, (each, *_) in zip(answers, models, given, strict=True)
    ]
    assert together == [pytest.approx(values, rel=2e-6) for values in alone]
    assert passes == {1: 2, 2: 1}

    load = {"models": 4, "waiting": 0, "passes": {"1": 2, "2": 1}}
    assert server.json("GET", "/health")[1]["training"] == load
    text = server.request("GET", "/metrics")[2].decode()
    assert 'mlx_packs_training_passes{models="2"} 1.0' in text


def test_calls_of_one_model_stay_in_order(client, other, server, datum, passes, at_once):
    """A model's calls are never in one pass: an update is between them."""
    model = client.create(seed=1)
    first = client.forward(model, [datum])[0]
    client.step(model)
    second = client.forward(model, [datum])[0]

    model = client.create(seed=1)
    theirs = other.create()
    with at_once(2):
        answers = [sent(client, model, [datum])]
        update = client.post("optim_step", {"model_id": model, "adam_params": ADAM})
        answers.append(sent(client, model, [datum]))
        sent(other, theirs, [datum])
    values = [loss_of(client, answer) for answer in answers]
    assert "error" not in client.result(update)
    assert values == pytest.approx([first, second], rel=1e-5) and second < first
    assert passes[2] == 1


def test_an_error_is_of_its_own_call(client, other, wait, datum, sampled, passes, at_once):
    """Faulty datums never reach a pass, numbers that are not finite fail one part of it."""
    models = [client.create(seed=seed) for seed in range(4)]
    mine = other.create()
    huge = datum[0], {**datum[1], "weights": [3e38] * len(datum[0])}
    with at_once(3):
        faulty = {
            "data[0]": sent(client, models[0], [(datum[0], {"target_tokens": [1]})]),
            "'unknown'": sent(client, models[1], [datum], "unknown"),
            "not finite": sent(client, models[2], [huge]),
        }
        last = sent(client, models[3], [datum])
        wait(2)
        unloaded = client.post("unload_model", {"model_id": models[3]})
        faulty["is not loaded"] = sent(client, models[3], [datum])
        good = sent(other, mine, [sampled], SAMPLED)

    assert loss_of(other, good) < 0 < loss_of(client, last)
    assert other.step(mine)["metrics"]["grad_norm"] > 0
    for message, answer in faulty.items():
        assert message in client.result(answer)["error"]
    assert "error" not in client.result(unloaded)
    assert passes == {3: 1}
    assert "no gradient" in client.step(models[2])["error"]


def test_a_pass_that_fails_is_computed_for_each_alone(
    client, other, datum, sampled, passes, at_once, monkeypatch
):
    broken = replace(losses.LOSSES[SAMPLED], terms=lambda _: 1 / 0)
    monkeypatch.setitem(losses.LOSSES, SAMPLED, broken)
    mine = client.create()
    theirs = other.create()
    with at_once(2):
        fails = sent(client, mine, [sampled], SAMPLED)
        stays = sent(other, theirs, [datum])
    assert client.result(fails)["category"] == "server"
    assert loss_of(other, stays) > 0 and passes == {1: 1}
    assert other.step(theirs)["metrics"]["grad_norm"] > 0


@pytest.fixture
def limit(monkeypatch):
    """Set the most inputs of a pass."""
    return lambda inputs: monkeypatch.setattr(passes_module, "MOST_INPUTS", inputs)


@pytest.fixture
def computed(server, monkeypatch):
    """The ids of the models of every pass, with its padded inputs, as they are computed."""
    models = server.training._models
    run = models._trainer.run
    seen = []

    def noted(parts, backward):
        names = {id(model.trained): model.id for model in models.all}
        inputs = sum(part.batch.arrays["tokens"].size for part in parts)
        seen.append(([names[id(part.model)] for part in parts], inputs))
        return run(parts, backward)

    monkeypatch.setattr(models._trainer, "run", noted)
    return seen


def test_a_long_call_shares_its_passes(client, other, wait, datum, computed, limit, at_once):
    """No pass has more inputs than the limit, and a short call is over after the first."""
    limit(32)
    long = client.create()
    short = other.create()
    rows = [shorter(datum, 8)] * 12
    with at_once(2):
        answer = sent(client, long, rows)
        wait(1)
        quick = sent(other, short, rows[:2])
    assert loss_of(client, answer) == pytest.approx(6 * loss_of(other, quick), rel=1e-5)

    assert [models for models, _ in computed] == [[long, short], [long], [long], [long]]
    assert all(inputs <= 32 for _, inputs in computed)


def test_calls_that_cannot_share_a_pass_take_turns(
    client, other, wait, datum, computed, limit, at_once
):
    """As one with gradients and one without."""
    limit(16)
    mine = client.create()
    theirs = other.create()
    rows = [shorter(datum, 8)] * 4
    with at_once(2):
        first = sent(client, mine, rows)
        wait(1)
        second = sent(other, theirs, rows, forward_only=True)
    assert loss_of(client, first) == pytest.approx(loss_of(other, second), rel=1e-6)
    assert [models for models, _ in computed] == [[mine], [theirs]] * 2


def test_chats_are_answered_between_passes(client, server, datum, computed, limit, at_once):
    limit(16)
    model = client.create()
    with at_once(1):
        answer = sent(client, model, [datum] * 60)
    assert server.chat("base", "Hi", max_tokens=4)["choices"]
    assert len(computed) < 60
    assert loss_of(client, answer) > 0 and len(computed) == 60


def test_a_call_that_is_cancelled_leaves_the_others(
    client, other, server, wait, datum, passes, at_once
):
    mine = client.create()
    theirs = other.create()
    with at_once(1):
        gone = sent(client, mine, [datum])
        stays = sent(other, theirs, [datum])
        wait(2)
        server.request("POST", "/api/v1/cancel_future", {"request_id": gone["request_id"]})
    assert loss_of(other, stays) > 0 and passes == {1: 1}
    assert "no gradient" in client.step(mine)["error"]


def test_a_pass_waits_for_models_of_the_one_before(client, other, wait, datum, passes, monkeypatch):
    """So that two clients in turn meet; a pass that is large enough does not wait."""
    monkeypatch.setattr(calls, "_PATIENCE", 1e6)
    monkeypatch.setattr(calls, "_MOST_PATIENCE", 30.0)
    mine = client.create()
    theirs = other.create()
    client.forward(mine, [datum])
    client.step(mine)
    answer = sent(other, theirs, [datum])
    wait(1)
    client.forward(mine, [datum])
    assert loss_of(other, answer) > 0 and passes == {1: 1, 2: 1}

    monkeypatch.setattr(calls, "SMALL", len(datum[0]) - 1)
    client.forward(mine, [datum])
    assert passes == {1: 2, 2: 1}
