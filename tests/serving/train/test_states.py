"""Saved models: paths that stay in their folder, and damage."""

import json

import pytest

from mlx_packs.errors import PackError
from mlx_packs.packs.pack import Pack
from mlx_packs.runtime import mx
from mlx_packs.serving.train.states import FACTS, OPTIMIZER, States, uri_of
from tests.helpers.packs import write_pack

MODEL = "abc:train:0"
OPTIMIZER_STATE = {"m": mx.ones(3), "step": mx.array(7, mx.uint64)}


@pytest.fixture
def pack(tmp_path):
    return Pack.open(write_pack(tmp_path / "pack").path)


@pytest.fixture
def states(tmp_path):
    return States(tmp_path / "states")


def test_saved_and_found(states, pack):
    uri = uri_of(MODEL, "weights", "one")
    states.save(uri, pack, {"user_metadata": {"a": "b"}}, OPTIMIZER_STATE)
    for path in (uri, f"tinker://{MODEL}/weights/one"):
        saved = states.find(path)
        assert saved.uri == uri == "tinker://abc-train-0/weights/one"
        assert saved.facts["user_metadata"] == {"a": "b"}
        assert states.optimizer_of(saved)["step"].item() == 7
        Pack.open(saved.folder).verify()

    states.remove(saved)
    with pytest.raises(PackError, match="nothing is saved"):
        states.find(uri)


def test_a_name_is_not_used_twice_unless_asked_to(states, pack):
    uri = uri_of(MODEL, "weights", "one")
    states.save(uri, pack, {}, OPTIMIZER_STATE)
    with pytest.raises(PackError, match="saved already"):
        states.save(uri, pack, {})
    states.save(uri, pack, {}, overwrite=True)
    with pytest.raises(PackError, match="no optimizer state"):
        states.optimizer_of(states.find(uri))


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
        states.find(path)


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "a" * 65, "a b"])
def test_names_that_are_none(name):
    with pytest.raises(PackError, match="cannot name"):
        uri_of(MODEL, "weights", name)


def test_a_link_out_of_the_folder_is_not_followed(states, pack, tmp_path):
    saved = states.save(uri_of(MODEL, "weights", "one"), pack, {})
    saved.folder.rename(tmp_path / "outside")
    saved.folder.symlink_to(tmp_path / "outside")
    with pytest.raises(PackError, match="nothing is saved"):
        states.find(saved.uri)


def test_damaged_ones(states, pack):
    saved = states.save(uri_of(MODEL, "weights", "one"), pack, {}, OPTIMIZER_STATE)
    file = saved.folder / OPTIMIZER
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(PackError, match="differs from its hash"):
        states.optimizer_of(states.find(saved.uri))

    (saved.folder / FACTS).write_text("{")
    with pytest.raises(PackError, match="not valid JSON"):
        states.find(saved.uri)


@pytest.mark.parametrize("facts", ["{", "[]"])
def test_a_damaged_one_is_no_fault_of_others(states, pack, facts):
    damaged = states.save(uri_of(MODEL, "weights", "damaged"), pack, {})
    (damaged.folder / FACTS).write_text(facts)
    kept = States(states.folder).save(uri_of(MODEL, "weights", "kept"), pack, {})
    assert states.find(kept.uri)
    with pytest.raises(PackError):
        states.find(damaged.uri)


def test_a_full_disk_leaves_what_was_there(states, pack, monkeypatch):
    uri = uri_of(MODEL, "weights", "one")
    saved = states.save(uri, pack, {"user_metadata": {"a": "b"}}, OPTIMIZER_STATE)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mlx_packs.serving.train.states.file_facts", full)
    with pytest.raises(PackError, match="No space left") as caught:
        states.save(uri, pack, {}, OPTIMIZER_STATE, overwrite=True)
    assert caught.value.code == "unwritable"

    again = States(states.folder).find(uri)
    assert again.facts == json.loads((saved.folder / FACTS).read_text())
    assert again.facts["user_metadata"] == {"a": "b"}
    assert sorted(each.name for each in saved.folder.parent.iterdir()) == ["one"]
