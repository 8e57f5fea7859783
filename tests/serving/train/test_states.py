"""Models that clients save and load: paths that stay in their folder, and damage."""

import json
from pathlib import Path

import pytest

from mlx_packs.adapters.spec import ranks_of
from mlx_packs.errors import PackError
from mlx_packs.packs.compatibility import check_base
from mlx_packs.packs.pack import Pack
from mlx_packs.runtime import mx
from mlx_packs.serving.train.states import (
    OPTIMIZER,
    Saved,
    find_saved,
    new_saved,
    optimizer_of,
    save_model,
)
from tests.helpers.packs import random_pack, write_pack

MODEL = "abc:train:0"
OPTIMIZER_STATE = {"m": mx.ones(3), "step": mx.array(7, mx.uint64)}


@pytest.fixture
def pack(tmp_path):
    return Pack.open(write_pack(tmp_path / "pack").path)


@pytest.fixture
def states(tmp_path):
    return tmp_path / "states"


def save(states, pack, facts=None, optimizer=None, overwrite=False) -> Saved:
    saved = new_saved(states, MODEL, "weights", "one", facts or {})
    save_model(saved, pack, optimizer, overwrite)
    return saved


def test_a_name_is_not_used_twice_unless_asked_to(states, pack):
    save(states, pack, optimizer=OPTIMIZER_STATE)
    with pytest.raises(PackError, match="saved already"):
        save(states, pack)
    save(states, pack, overwrite=True)
    with pytest.raises(PackError, match="no optimizer state"):
        optimizer_of(find_saved(states, f"tinker://{MODEL}/weights/one"))  # the same as its URI


@pytest.mark.parametrize(
    "path",
    [
        "tinker://abc-train-0/weights/..",
        "tinker://../weights/one",
        "tinker://abc-train-0/weights/one/../../x",
        "tinker://abc-train-0/elsewhere/one",
        "tinker:///weights/one",
        "abc-train-0/weights/one",
        "/etc/passwd",
        "tinker://abc-train-0/weights/" + "a" * 65,
        "tinker://abc-train-0/weights/\0",
        "",
    ],
)
def test_paths_that_are_none(states, path):
    with pytest.raises(PackError, match="must be tinker://RUN/weights/NAME"):
        find_saved(states, path)


def test_names_that_are_none():
    for name in ("", "..", "a/b", ".hidden", "a" * 65, "a b"):
        with pytest.raises(PackError, match="cannot name"):
            new_saved(Path(), MODEL, "weights", name, {})


def test_a_link_out_of_the_folder_is_not_followed(states, pack, tmp_path):
    saved = save(states, pack)
    saved.folder.rename(tmp_path / "outside")
    saved.folder.symlink_to(tmp_path / "outside")
    with pytest.raises(PackError, match="nothing is saved"):
        find_saved(states, saved.uri)


def test_damaged_ones(states, pack):
    saved = save(states, pack, optimizer=OPTIMIZER_STATE)
    file = saved.folder / OPTIMIZER
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(PackError, match="differs from its hash"):
        optimizer_of(find_saved(states, saved.uri))

    (saved.folder / "training.json").write_text("{")
    with pytest.raises(PackError, match="not valid JSON"):
        find_saved(states, saved.uri)


def test_a_full_disk_leaves_what_was_there(states, pack, monkeypatch):
    saved = save(states, pack, {"user_metadata": {"a": "b"}}, OPTIMIZER_STATE)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mlx_packs.serving.train.states.file_facts", full)
    with pytest.raises(PackError, match="No space left") as caught:
        save(states, pack, {}, OPTIMIZER_STATE, overwrite=True)
    assert caught.value.code == "unwritable"

    again = find_saved(states, saved.uri)
    assert again.facts == json.loads((saved.folder / "training.json").read_text())
    assert again.facts["user_metadata"] == {"a": "b"}
    assert sorted(each.name for each in saved.folder.parent.iterdir()) == ["one"]


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

    body = {"model_id": model, "path": path, "optimizer": True}
    error = client.post("load_weights", body, 400)["error"]
    assert error["param"] == "model_id" and "create_training_client_from_state" in error["message"]


def test_a_saved_model_is_a_pack(client, generator, datum):
    model = client.create()
    client.forward(model, [datum])
    client.step(model)
    body = {"model_id": model, "path": "mine", "user_metadata": {"a": "b"}}
    path = client.call("save_weights", body)["path"]
    client.call("save_weights_for_sampler", {"model_id": model, "path": "mine"})
    for field, value in (("ttl_seconds", 3600), ("kind", "inflight")):  # of other servers
        client.post("save_weights_for_sampler", {"model_id": model, field: value}, 400)
    folders = sorted(client.server.folder.glob("*/*/mine"))
    assert [folder.parent.name for folder in folders] == ["sampler_weights", "weights"]
    for folder in folders:
        pack = Pack.open(folder)
        pack.verify()
        check_base(pack, generator.base)
    assert path == f"tinker://{folders[0].parent.parent.name}/weights/mine"

    run = path.split("/")[2]
    assert client.server.json("GET", f"/api/v1/training_runs/{run}/checkpoints")[0] == 404
    facts = json.loads((folders[1] / "training.json").read_text())
    assert facts["user_metadata"] == {"a": "b"}
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
    body = {"session_id": client.session, "model_seq_id": 0, "path": path}
    assert "no optimizer state" in client.call("load_weights", body | {"optimizer": True})["error"]
    body |= {"model_seq_id": 1, "optimizer": False}
    model = client.call("load_weights", body)["model_id"]
    loss, _ = client.forward(model, [datum])
    client.step(model)
    assert client.forward(model, [datum])[0] < loss
    client.call("save_weights", {"model_id": model, "path": "again"})
    run = model.replace(":", "-")
    again = Pack.open(client.server.folder / run / "weights" / "again")
    assert set(ranks_of(again.specs)) == {6}
