"""adapter_config.json: what stock mlx-lm and mlx-swift-lm read of a pack, over all architectures."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.tuner.utils import load_adapters

from mlx_packs.packs.making import attach_pack
from mlx_packs.packs.manifest import ADAPTERS
from mlx_packs.packs.pack import Pack
from mlx_packs.reading import read_header
from tests.helpers.families import family_base
from tests.helpers.family_sweep import FAMILIES, sweep
from tests.helpers.packs import random_pack
from tests.helpers.swift import load_into

TOKENS = mx.arange(1, 17)[None]


def saved(base, folder: Path, target_modules=(), **lora) -> Pack:
    return random_pack(base, 1, 4, target_modules, **lora).save(folder)


def logits(model) -> np.ndarray:
    model.eval()
    result = model(TOKENS)
    result = result[0] if isinstance(result, tuple) else result
    return np.nan_to_num(np.array(result.astype(mx.float32)), neginf=0.0)


IRREGULAR = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj")
SWEEP = [
    pytest.param(*family.values, (), marks=family.marks)
    for family in sweep([f for f in FAMILIES if f != "afm7"])
]


@pytest.mark.parametrize(("family", "targets"), [*SWEEP, ("qwen3", IRREGULAR)])
def test_stock_readers_open_a_pack(family, targets, tmp_path):
    base = family_base(family)
    plain = logits(base.model)
    pack = saved(base, tmp_path / "pack", target_modules=targets)
    attached = attach_pack(base, pack)
    expected = logits(base.model)
    attached.detach()
    assert np.abs(expected - plain).max() > 1e-3
    config = json.loads((tmp_path / "pack" / "adapter_config.json").read_text())
    assert config["num_layers"] == len(base.model.layers)
    bound = 1e-4 * max(1.0, np.abs(expected).max())

    stock = load_adapters(family_base(family).model, str(tmp_path / "pack"))
    assert np.abs(logits(stock) - expected).max() < bound
    swift = load_into(family_base(family).model, tmp_path / "pack")
    assert np.abs(logits(swift) - expected).max() < bound


def test_the_last_blocks_alone_are_counted(tmp_path):
    saved(family_base("qwen3"), tmp_path / "p", num_layers=1)
    config = json.loads((tmp_path / "p" / "adapter_config.json").read_text())
    assert config["num_layers"] == 1
    assert "self_attn.q_proj" in config["lora_parameters"]["keys"]


def test_a_fused_projection_pads_the_others_to_its_rank(tmp_path):
    base = family_base("phi3")
    pack = saved(base, tmp_path / "p")
    ranks = {spec.rank for spec in pack.specs.values()}
    assert len(ranks) > 1
    header, _ = read_header(tmp_path / "p" / ADAPTERS)
    stored = {t["shape"][1] for name, t in header.items() if name.endswith("lora_a")}
    assert stored == {max(ranks)}
    again = Pack.open(tmp_path / "p")
    for name, tensor in pack.load_tensors().items():
        assert mx.array_equal(again.load_tensors()[name], tensor)
    copy = Pack(again.manifest, again.load_tensors()).save(tmp_path / "copy")
    assert (copy.path / ADAPTERS).read_bytes() == (tmp_path / "p" / ADAPTERS).read_bytes()


@pytest.mark.slow
def test_afm7_has_adapters_of_its_own_in_mlx_lm(tmp_path):
    saved(family_base("afm7"), tmp_path / "p")
    assert not (tmp_path / "p" / "adapter_config.json").exists()
