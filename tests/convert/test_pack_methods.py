"""What a pack does by its own methods equals the functions, which also take its folder."""

from pathlib import Path

import pytest

from mlx_packs import Pack, export_pack, load_base, merge_pack
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.errors import raises
from tests.helpers.packs import random_pack

FEW = {"rows": 2, "max_drift": 10.0, "progress": False}


@pytest.fixture
def saved(tmp_path, monkeypatch) -> Pack:
    """A pack whose base is found by its name in the current folder."""
    monkeypatch.chdir(tmp_path)
    return random_pack(load_base(write_checkpoint(tmp_path / "base"))).save("pack")


def same_bytes(name: str) -> bool:
    return Path("by-method", name).read_bytes() == Path("by-function", name).read_bytes()


def test_a_pack_is_merged_into_its_own_base(saved):
    merge_pack("pack", "base", "by-function", **FEW)
    report = saved.merge("by-method", **FEW)
    assert report["passed"] and report["model"] == "base"
    assert same_bytes("model.safetensors")


def test_a_pack_is_merged_into_a_loaded_base(saved):
    report = saved.merge("merged", load_base("base"), requantize="affine8", **FEW)
    assert report["passed"] and report["requantize"] == "affine8"


def test_a_pack_is_exported(saved):
    export_pack("pack", "peft", "by-function")
    assert saved.export("peft", "by-method")["to"] == "peft"
    assert same_bytes("adapter_model.safetensors") and same_bytes("adapter_config.json")


def test_arguments_of_other_libraries_are_answered(saved):
    with raises("unknown", "model", "It is called 'base' here"):
        merge_pack("pack", model="base", out="x")
    with raises("unknown", "repo_id", "It is called 'repo' here"):
        saved.push(repo_id="me/pack", repo="me/pack")
