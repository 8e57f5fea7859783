"""Models that clients save and load."""

import json

from mlx_packs.adapters.spec import ranks_of
from mlx_packs.packs.compatibility import check_base
from mlx_packs.packs.pack import Pack
from tests.helpers.packs import random_pack


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


def test_fields_of_saving_that_are_not_supported(client):
    body = {"model_id": client.create()}
    for field, value in (("ttl_seconds", 3600), ("kind", "inflight")):
        error = client.post("save_weights_for_sampler", body | {field: value}, 400)["error"]
        assert error["param"] == field
