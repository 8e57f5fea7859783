"""What a pack does by its own methods equals the functions, which also take its folder."""

from pathlib import Path

import pytest

from mlx_packs import Pack, export_pack, load_base, merge_pack
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.packs import random_pack

FEW = {"rows": 2, "max_drift": 10.0, "progress": False}


@pytest.fixture
def saved(tmp_path, monkeypatch) -> Pack:
    """A pack whose base is found by its name in the current folder."""
    monkeypatch.chdir(tmp_path)
    return random_pack(load_base(write_checkpoint(tmp_path / "base"))).save("pack")


def same_bytes(name: str) -> bool:
    return Path("by-method", name).read_bytes() == Path("by-function", name).read_bytes()


def test_a_pack_is_merged_into_its_own_base_or_a_loaded_one(saved):
    merge_pack("pack", "base", "by-function", **FEW)
    report = saved.merge("by-method", **FEW)
    assert report["passed"] and report["model"] == "base"
    assert same_bytes("model.safetensors")
    report = saved.merge("merged", load_base("base"), requantize="affine8", **FEW)
    assert report["passed"] and report["requantize"] == "affine8"


def test_a_pack_is_exported(saved):
    export_pack("pack", "peft", "by-function")
    assert saved.export("peft", "by-method")["to"] == "peft"
    assert same_bytes("adapter_model.safetensors") and same_bytes("adapter_config.json")
