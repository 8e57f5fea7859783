"""Models trained over HTTP, by requests of a small client."""

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from mlx_packs.adapters.attach import attach
from mlx_packs.config.lora import LoRAConfig
from mlx_packs.errors import PackError
from mlx_packs.packs.pack import Pack
from mlx_packs.runtime import mx
from mlx_packs.serving.train import models, service
from tests.helpers.packs import random_pack
from tests.helpers.serving import SECONDS, Running, until
from tests.helpers.tinker import ADAM, PROTO, TinkerClient, forward_request
from tests.serving.train.conftest import Training


def likelihoods(base, tokens: list[int]) -> np.ndarray:
    """The log-probability of each token but the first, by the whole model."""
    logits = base.model(mx.array([tokens[:-1]]))[0].astype(mx.float32)
    scores = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return np.array(mx.take_along_axis(scores, mx.array(tokens[1:])[:, None], axis=-1)[:, 0])


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
    norm = client.step(model, learning_rate=1e-3)["metrics"]["grad_norm"]
    assert norm > 0

    trained = client.server.training._models.find(model).trained.attached.tensors()
    values = np.array(trained["model.layers.0.self_attn.q_proj.lora_b"])
    np.testing.assert_allclose(np.abs(values[values != 0]), 1e-3, rtol=1e-4)

    fresh = attached_tensors(generator, seed=3)
    name = "model.layers.0.self_attn.q_proj.lora_a"
    np.testing.assert_array_equal(np.array(trained[name]), fresh[name])


def attached_tensors(generator, seed: int) -> dict[str, np.ndarray]:
    """What `packs train` begins with."""

    def compute():
        with generator.registry.slots.lifted():
            attached = attach(generator.base, LoRAConfig(rank=4), seed=seed)
            tensors = {name: np.array(tensor) for name, tensor in attached.tensors().items()}
            attached.detach()
        return tensors

    return generator.call(compute).result()


def test_gradients_add_up_in_batches_and_in_requests(client, datum, monkeypatch):
    rows = [datum, (datum[0][:5], {name: values[:5] for name, values in datum[1].items()})]
    norms = []
    for tokens, parts in ((2048, [rows]), (8, [rows]), (2048, [rows[:1], rows[1:]])):
        monkeypatch.setattr("mlx_packs.serving.train.passes.MOST_INPUTS", tokens)
        model = client.create()
        for part in parts:
            client.forward(model, part)
        norms.append(client.step(model)["metrics"]["grad_norm"])
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-4)


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


def test_reinforcement_losses_of_samples(client, generator, tokens):
    """Log-probabilities of samples are those of the forward pass, so that ratios begin at 1."""
    model = client.create()
    session = client.call("save_weights_for_sampler", {"model_id": model})["sampling_session_id"]
    response = client.sample(session, tokens[:6], params={"temperature": 1.0, "seed": 5})
    (sequence,) = response.sequences
    sampled = np.frombuffer(sequence.tokens, np.int32).tolist()
    logprobs = np.frombuffer(sequence.logprobs, np.float32)

    row = tokens[:6] + sampled[:-1]
    zeros = [0.0] * 5
    inputs = {
        "target_tokens": tokens[1:6] + sampled,
        "logprobs": zeros + logprobs.tolist(),
        "advantages": zeros + [1.0] * len(sampled),
    }
    for loss in ("importance_sampling", "ppo"):
        value, (scores,) = client.forward(model, [(row, inputs)], loss)
        assert value == pytest.approx(-len(sampled), rel=1e-3)
        np.testing.assert_allclose(scores[5:], logprobs, atol=2e-3)


def test_samples(client, generator, tokens):
    session = client.session_on()
    fields = {"prompt_logprobs": True, "topk_prompt_logprobs": 2, "topk_sample_logprobs": 3}
    response = client.sample(session, tokens[:8], 2, params={"max_tokens": 4}, **fields)
    assert [each.stop_reason for each in response.sequences] == [1, 1]
    first, second = (np.frombuffer(each.tokens, np.int32) for each in response.sequences)
    assert first.tolist() == second.tolist() and len(first) == 4
    top = response.sequences[0].topk_sampled_logprobs
    assert (top.k, top.length) == (3, 4)

    scores = np.frombuffer(response.prompt_logprobs, np.float32)
    assert np.isnan(scores[0])
    actual = generator.call(lambda: likelihoods(generator.base, tokens[:8])).result()
    np.testing.assert_allclose(scores[1:], actual, atol=2e-3)
    assert (response.topk_prompt_logprobs.k, response.topk_prompt_logprobs.length) == (2, 8)

    last = client.sample(session, tokens[:8], prompt_logprobs=True, prompt_logprobs_last_n=2)
    assert (
        np.isnan(np.frombuffer(last.prompt_logprobs, np.float32)).tolist()
        == [True] * 6 + [False] * 2
    )


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
        ({"prompt": {"chunks": []}}, "prompt"),
        ({"prompt": {"chunks": [{"tokens": [10**6]}]}}, "prompt"),
        ({"prompt": {"chunks": [{"tokens": [5] * 2048}]}, "prompt_logprobs": True}, "prompt"),
        ({"sampling_params": {"max_tokens": 2043}}, "prompt"),
        ({"num_samples": 65}, "num_samples"),
        ({"prompt_logprobs_last_n": 6}, "prompt_logprobs_last_n"),
        ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k"),
        ({"record_stability_info": True}, "record_stability_info"),
        ({"num_samples": 0}, "num_samples"),
        ({"sampling_params": {"temperature": -1.0}}, "sampling_params.temperature"),
    ],
)
def test_faulty_samples(client, tokens, fields, where):
    body = {"prompt": {"chunks": [{"tokens": tokens[:6]}]}, "sampling_params": {}}
    body |= {"sampling_session_id": client.session_on(), **fields}
    assert client.post("asample", body, 400)["error"]["param"] == where


def test_steps_of_a_model_and_its_newest_weights(client, datum):
    model = client.create()
    sessions = {}
    for kind in ("snapshot", "inflight"):
        body = {"model_id": model, "kind": kind, "sampling_session_seq_id": 0}
        sessions[kind] = client.call("save_weights_for_sampler", body)["sampling_session_id"]

    def score(kind: str) -> float:
        response = client.sample(sessions[kind], datum[0], prompt_logprobs=True)
        return float(np.nansum(np.frombuffer(response.prompt_logprobs, np.float32)))

    before = score("snapshot")
    assert score("inflight") == before
    client.forward(model, [datum])
    client.step(model, learning_rate=1e-2)
    client.call("save_weights_for_sampler", {"model_id": model, "kind": "inflight"})
    assert score("snapshot") == before
    assert score("inflight") > before + 1

    client.call("unload_model", {"model_id": model})
    assert client.server.worker.registry.names == ["base"]
    answer = client.post("asample", sample_body(sessions["snapshot"]))
    assert "is not served" in client.result(answer)["error"]


def sample_body(session: str) -> dict:
    prompt = {"chunks": [{"tokens": [1, 2]}]}
    return {"sampling_session_id": session, "prompt": prompt, "sampling_params": {"max_tokens": 1}}


def test_a_saved_model_goes_on_as_if_it_had_not_been_saved(client, datum):
    model = client.create()

    def train(each: str) -> list[float]:
        losses = []
        for _ in range(2):
            losses.append(client.forward(each, [datum])[0])
            client.step(each)
        return losses

    train(model)
    path = client.call("save_weights", {"model_id": model, "path": "two"})["path"]
    alone = train(model)
    for optimizer in (True, False):
        body = {"session_id": client.session, "model_seq_id": client.models, "path": path}
        client.models += 1
        loaded = client.call("load_weights", body | {"optimizer": optimizer})["model_id"]
        losses = train(loaded)
        assert losses[0] == alone[0] and (losses == alone) is optimizer

    client.call("load_weights", {"model_id": model, "path": path, "optimizer": True})
    assert train(model) == alone
    info = client.post("weights_info", {"tinker_path": path})
    assert info["lora_rank"] == 4 and info["train_unembed"] is False


def test_a_saved_model_is_a_pack(client, generator, datum):
    model = client.create()
    client.forward(model, [datum])
    client.step(model)
    body = {"model_id": model, "path": "mine", "ttl_seconds": 3600, "user_metadata": {"a": "b"}}
    path = client.call("save_weights", body)["path"]
    client.call("save_weights_for_sampler", {"model_id": model, "path": "mine"})
    folders = sorted(client.server.folder.glob("*/*/mine"))
    assert [folder.parent.name for folder in folders] == ["sampler_weights", "weights"]
    for folder in folders:
        pack = Pack.open(folder)
        pack.verify()
        pack.check_base(generator.base)
    assert path == f"tinker://{folders[0].parent.parent.name}/weights/mine"

    run = path.split("/")[2]
    status, answer = client.server.json("GET", f"/api/v1/training_runs/{model}/checkpoints")
    assert status == 200 and [each["checkpoint_id"] for each in answer["checkpoints"]] == [
        "sampler_weights/mine",
        "weights/mine",
    ]
    assert answer["checkpoints"][1]["user_metadata"] == {"a": "b"}
    url = f"/api/v1/training_runs/{run}/checkpoints/weights/mine"
    assert client.server.request("DELETE", url)[0] == 204
    assert client.server.request("DELETE", url)[0] == 404


def test_a_pack_from_elsewhere_is_trained_further(client, generator, datum):
    def write() -> None:
        with generator.registry.slots.lifted():
            pack = random_pack(generator.base, rank=6)
        pack.save(client.server.folder / "mine" / "weights" / "notes")

    generator.call(write).result()
    path = "tinker://mine/weights/notes"
    info = client.post("weights_info", {"tinker_path": path})
    assert info["lora_rank"] == 6 and "train_mlp" not in info

    body = {"session_id": client.session, "model_seq_id": 0, "path": path}
    assert "no optimizer state" in client.call("load_weights", body | {"optimizer": True})["error"]
    body |= {"model_seq_id": 1, "optimizer": False}
    model = client.call("load_weights", body)["model_id"]
    loss, _ = client.forward(model, [datum])
    client.step(model)
    assert client.forward(model, [datum])[0] < loss
    client.call("save_weights", {"model_id": model, "path": "again"})
    run = model.replace(":", "-")
    info = client.post("weights_info", {"tinker_path": f"tinker://{run}/weights/again"})
    assert info["lora_rank"] == 6 and "train_mlp" not in info


def test_samples_of_saved_models_leave_memory_and_come_back(client, datum, monkeypatch):
    monkeypatch.setattr("mlx_packs.serving.train.sampling_sessions._LOADED", 1)
    model = client.create()
    sessions = []
    for name in ("a", "b"):
        path = client.call("save_weights_for_sampler", {"model_id": model, "path": name})["path"]
        sessions.append(client.session_on(path))
    for session in sessions:
        assert client.sample(session, datum[0]).sequences
        assert len(client.server.worker.registry.names) == 2
    status, answer = client.server.json("GET", f"/api/v1/samplers/{sessions[0]}")
    assert status == 200 and answer["model_path"].endswith("/sampler_weights/a")


def test_models_that_are_sampled_from_stay_in_memory(client, server, datum, monkeypatch):
    """All are loaded before the first text has its place."""
    monkeypatch.setattr("mlx_packs.serving.train.sampling_sessions._LOADED", 1)
    model = client.create()
    bodies = []
    for name in ("a", "b", "c"):
        path = client.call("save_weights_for_sampler", {"model_id": model, "path": name})["path"]
        bodies.append(sample_body(client.session_on(path)) | {"num_samples": 8})

    answers = [client.post("asample", body) for body in bodies for _ in range(3)]
    assert all(isinstance(client.result(answer), bytes) for answer in answers)
    assert len(server.worker.registry.names) == 2


def test_the_newest_weights_are_the_last_to_leave(client, monkeypatch):
    monkeypatch.setattr("mlx_packs.serving.train.sampling_sessions._LOADED", 2)
    model = client.create()
    body = {"model_id": model}
    for number in (None, 1, None, 2):
        step = {"kind": "snapshot", "sampling_session_seq_id": number}
        client.call("save_weights_for_sampler", body | (step if number else {"kind": "inflight"}))
    run = model.replace(":", "-")
    names = ["base", f"tinker/{run}/inflight", f"tinker/{run}/step-2"]
    assert client.server.worker.registry.names == names


def test_samples_are_of_what_is_saved_now(client, datum):
    model = client.create()
    body = {"model_id": model, "path": "mine", "overwrite": True}
    path = client.call("save_weights", body)["path"]
    session = client.session_on(path)

    def score() -> float:
        response = client.sample(session, datum[0], prompt_logprobs=True)
        return float(np.nansum(np.frombuffer(response.prompt_logprobs, np.float32)))

    before = score()
    client.forward(model, [datum])
    client.step(model, learning_rate=1e-2)
    client.call("save_weights", body)
    assert score() > before + 1

    names = client.server.worker.registry
    assert path.replace("tinker://", "tinker/") in names.names
    run, kind, name = path.removeprefix("tinker://").split("/")
    client.server.request("DELETE", f"/api/v1/training_runs/{run}/checkpoints/{kind}/{name}")
    assert "nothing is saved" in client.call("asample", sample_body(session))["error"]
    assert names.names == ["base"]


def test_a_time_to_live_that_is_too_long(client):
    body = {"model_id": client.create(), "path": "long", "ttl_seconds": 10**18}
    for path in ("save_weights", "save_weights_for_sampler"):
        assert client.post(path, body, 400)["error"]["param"] == "ttl_seconds"


def test_an_expired_model_is_served_no_more(client, monkeypatch):
    model = client.create()
    body = {"model_id": model, "path": "soon", "ttl_seconds": 1}
    client.session_on(client.call("save_weights_for_sampler", body)["path"])
    assert len(client.server.worker.registry.names) == 2
    later = time.time() + 1.1
    monkeypatch.setattr(time, "time", lambda: later)
    client.call("save_weights", {"model_id": model, "path": "other"})
    until(lambda: client.server.worker.registry.names == ["base"])


def test_errors_leave_the_model_as_it_was(client, datum):
    model = client.create()
    message, category = client.forward(model, [datum, (datum[0], {"target_tokens": [1]})])
    assert message.startswith("data[1]") and category == "user"
    assert client.forward(model, [datum], "custom")[1] == "user"
    assert client.forward(model, [])[0].startswith("data: ")

    huge = datum[0], {**datum[1], "weights": [3e38] * len(datum[0])}
    assert "not finite" in client.forward(model, [huge])[0]
    answer = client.step(model)
    assert answer == {"error": answer["error"], "category": "user"}
    assert "no gradient" in answer["error"]
    assert client.forward(model, [datum])[0] > 0


def test_a_failed_step_is_an_error_of_the_server(client, datum, monkeypatch):
    model = client.create()
    with monkeypatch.context() as patch:
        patch.setattr("mlx_packs.serving.train.passes.target_loss", lambda *_, **__: 1 / 0)
        message, category = client.forward(model, [datum])
    assert category == "server" and "log" in message
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

    answer = client.call("create_model", body | {"lora_config": {"rank": 4096}})
    assert "--rank 4096" in answer["error"] and answer["category"] == "user"
    only_head = {"train_attn": False, "train_mlp": False}
    answer = client.call("create_model", body | {"model_seq_id": 1, "lora_config": only_head})
    assert "table of its embeddings" in answer["error"]


@pytest.mark.parametrize(("config", "part"), [("train_attn", "self_attn"), ("train_mlp", "mlp")])
def test_layers_of_a_model(client, config, part):
    others = {"train_attn": False, "train_mlp": False, config: True}
    model = client.create(**others)
    paths = client.server.training._models.find(model).trained.attached.specs
    assert paths and all(part in path for path in paths)


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


def test_models_that_are_made_at_once_are_not_too_many(client, server):
    until_all_came = threading.Event()
    busy = server.worker.call(lambda: until_all_came.wait(SECONDS))
    body = {"session_id": client.session, "base_model": "base", "lora_config": {"rank": 4}}
    answers = [client.post("create_model", body | {"model_seq_id": i}) for i in range(10)]
    until_all_came.set()
    busy.result()
    results = [client.result(answer) for answer in answers]
    assert ["error" in each for each in results] == [False] * 8 + [True] * 2


def test_an_unload_finds_the_step_that_is_copied(client, server):
    model = client.create()
    both_came = threading.Event()
    server.worker.post(lambda: both_came.wait(SECONDS))
    bodies = {"save_weights_for_sampler": {"model_id": model}, "unload_model": {"model_id": model}}
    answers = [client.post(path, body) for path, body in bodies.items()]
    both_came.set()
    for answer in answers:
        assert "error" not in client.result(answer)
    assert server.worker.registry.names == ["base"]


def test_the_end_of_a_session(client):
    model = client.create()
    client.post("session_heartbeat", {"session_id": client.session})
    client.post(f"sessions/{client.session}/finish", {"status": "success"})
    client.post("get_info", {"model_id": model}, 404)
    client.post("session_heartbeat", {"session_id": client.session}, 410)


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


def test_results_that_are_not_there(client, server, datum, monkeypatch):
    client.post("retrieve_future", {"request_id": "x"}, 410)
    client.server.request("POST", "/api/v1/cancel_future", {"request_id": "x"})

    model = client.create()
    monkeypatch.setattr(service, "_POLL_SECONDS", 0.01)
    was_told = threading.Event()
    busy = server.worker.call(lambda: was_told.wait(SECONDS))
    answer = client.post("save_weights", {"model_id": model, "path": "a"})
    pending = client.post("retrieve_future", {"request_id": answer["request_id"]}, 408)
    assert pending["type"] == "try_again"
    was_told.set()
    busy.result()


def test_a_full_queue(client, monkeypatch):
    monkeypatch.setattr("mlx_packs.serving.train.results.Results.running", 64)
    answer = client.post("asample", sample_body(client.session_on()), 429)
    assert answer["error"]["code"] == "busy"


def test_samples_that_find_no_place_in_time(generator, tmp_path, monkeypatch):
    def full(_):
        raise PackError("The queue is full.", "busy")

    monkeypatch.setattr(generator, "_check", full)
    with Training(generator, tmp_path, request_seconds=0.3) as server:
        client = TinkerClient(server)
        answer = client.call("asample", sample_body(client.session_on()))
    assert "queue is full" in answer["error"]


def test_requests_while_the_server_ends(client, server):
    """They have some time; then a client that waits is told, and others are not taken."""
    model = client.create()
    ended = threading.Event()
    busy = server.worker.call(lambda: ended.wait(SECONDS))
    answer = client.post("save_weights", {"model_id": model, "path": "a"})
    waiting = {"request_id": answer["request_id"]}
    with ThreadPoolExecutor(1) as pool:
        poll = pool.submit(client.post, "retrieve_future", waiting, 503)
        asyncio.run_coroutine_threadsafe(server.training.end(0.1), server.loop).result()
        assert poll.result()["error"]["code"] == "interrupted"
    client.post("save_weights", {"model_id": model, "path": "b"}, 503)
    ended.set()
    busy.result()


def test_a_client_that_leaves_a_sample(client, server):
    answer = client.post("asample", sample_body(client.session_on()) | {"num_samples": 4})
    server.request("POST", "/api/v1/cancel_future", {"request_id": answer["request_id"]})
    assert client.sample(client.session_on(), [1, 2]).sequences


def test_the_key(generator, tmp_path):
    with Training(generator, tmp_path, api_key="tml-secret") as server:
        body = {"sdk_version": "0"}
        assert server.json("POST", "/api/v1/client/config", body)[0] == 401
        wrong = {"X-API-Key": "tml-other"}
        assert server.json("POST", "/api/v1/client/config", body, **wrong)[0] == 401
        for key in ({"X-API-Key": "tml-secret"}, {"Authorization": "Bearer tml-secret"}):
            assert server.json("POST", "/api/v1/client/config", body, **key)[0] == 200


def test_limits_of_bodies(generator, tmp_path):
    with Training(generator, tmp_path, body_bytes=1000) as server:
        status, answer = server.json("POST", "/api/v1/client/config", {"sdk_version": "0"})
        assert answer["fwdbwd_max_chunk_bytes_count"] == 500
        assert answer["fwdbwd_max_chunk_len"] == 1_000_000
        path = "/api/v1/forward_backward"
        assert server.request("POST", path, b"x" * 1001, PROTO)[0] == 413
        assert server.request("POST", path, {})[0] == 415
        assert server.request("POST", "/api/v1/create_session", b"x", PROTO)[0] == 415


def test_what_a_client_asks_first(client, server):
    assert server.json("GET", "/api/v1/healthz") == (200, {"status": "ok"})
    status, answer = server.json("GET", "/api/v1/get_server_capabilities")
    (model,) = answer["supported_models"]
    assert model["model_name"] == server.worker.base.public_name
    assert model["max_context_length"] == 2048
    assert client.post("telemetry", {"events": []}) == {"status": "accepted"}
    assert client.post("client/dynamic_config", {"sdk_version": "0"})["sample_cancel_enabled"]


def test_a_server_without_training_has_no_such_routes(generator):
    with Running(generator) as server:
        assert server.json("GET", "/api/v1/healthz")[0] == 404
