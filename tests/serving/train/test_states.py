"""Saved models: paths that stay in their folder, and damage."""

import json
from pathlib import Path

import pytest

from mlx_packs.errors import PackError
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
from tests.helpers.packs import write_pack

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
