"""Which tensor of a base's files an adapter changes: true, or not said; no other is merged."""

from pathlib import Path

import pytest
from mlx.utils import tree_flatten

from mlx_packs import load_base
from mlx_packs.bases.model import weight_map
from mlx_packs.reading import read_header
from mlx_packs.runtime import mx
from tests.bases.changes import tensors_of
from tests.helpers.checkpoints import merged, write_checkpoint, write_files
from tests.helpers.models import model_of
from tests.helpers.packs import random_pack


def renamed(folder: Path) -> Path:
    """A Qwen2-VL, whose files name the language model as if it stood alone."""
    model, text = model_of("qwen2", vocab_size=4096)
    tensors = {**dict(tree_flatten(model.parameters())), "visual.x.weight": mx.zeros((2, 2))}
    return write_files(folder, tensors, {**text, "model_type": "qwen2_vl"})


def one_by_one(folder: Path) -> Path:
    """A mixture whose experts lie one by one, as transformers has them."""
    write_checkpoint(folder, "qwen3_moe")
    file = str(folder / "model.safetensors")
    apart = {}
    for name, tensor in mx.load(file).items():
        each = [tensor]
        if ".switch_mlp." in name:
            each = map(mx.contiguous, tensor)
        for e, expert in enumerate(each):
            apart[name.replace("switch_mlp.", f"experts.{e}.")] = expert
    mx.save_safetensors(file, apart)
    return folder


def keys_of(pack) -> dict:
    return {m["path"]: m.get("base_key") for m in pack.manifest["adapters"]["modules"]}


MADE = {"gpt2": ("c_attn", "attn.c_proj"), "qwen2_vl": ("q_proj",)}


@pytest.mark.parametrize("family", MADE)
def test_merge_changes_exactly_the_tensors_of_the_manifest(family, tmp_path, run):
    folder = tmp_path / "base"
    base = renamed(folder) if family == "qwen2_vl" else write_checkpoint(folder, family)
    pack = random_pack(load_base(base), targets=MADE[family]).save(tmp_path / "pack")
    keys = set(keys_of(pack).values())
    assert len(keys) == len(pack.specs) and None not in keys
    report = merged(pack, base, tmp_path / "out", dtype="float32")
    assert report["names"] == "base"
    before, after = tensors_of(base), tensors_of(tmp_path / "out")
    assert list(map(str, sorted(before))) == sorted(after)
    assert {n for n in before if not mx.array_equal(before[n], after[n])} == keys
    assert all(before[n].shape == after[n].shape for n in before)
    _, shown, _ = run("inspect", tmp_path / "pack", "-v")
    assert all(f"base key {key}" in shown for key in keys)


def test_stacked_experts_name_the_tensor_of_each(tmp_path):
    base = load_base(one_by_one(tmp_path / "moe"))
    pack = random_pack(base, targets=("switch_mlp.down_proj", "q_proj")).save(tmp_path / "pack")
    stacked = keys_of(pack)["model.layers.1.mlp.switch_mlp.down_proj"]
    assert stacked == [f"model.layers.1.mlp.experts.{e}.down_proj.weight" for e in range(4)]
    header, _ = read_header(tmp_path / "moe" / "model.safetensors")
    assert set(stacked) <= set(header)


def test_what_is_not_certain_is_not_said():
    a, b = mx.zeros((2, 3)), mx.zeros((3, 2))
    assert weight_map({"x.a.weight": a, "y.a.weight": b}, {"z.x.a.weight": mx.zeros((4, 4))}) == {}
    assert weight_map({"a.weight": a, "x.a.weight": b}, {"y.x.a.weight": mx.zeros((3, 2))}) == {}
    assert weight_map({"a.weight": a}, {"m.a.weight": mx.zeros((3, 2))}) == {
        "m.a.weight": "a.weight"
    }
    assert weight_map({"a.weight": a}, {"anything.weight": a}) == {"anything.weight": "a.weight"}
    experts = {f"m.experts.{e}.up_proj.weight": mx.zeros((3, 2)) for e in range(3)}
    assert weight_map(experts, {"m.switch_mlp.up_proj.weight": mx.zeros((2, 3, 2))}) == {}
