"""packs merge: the merged model computes what the attached pack did, under the original tensor names."""

import json
import shutil
from functools import cache
from pathlib import Path

import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from mlx_packs import Pack, load_base
from mlx_packs.bases.nf4 import NF4Format
from mlx_packs.bases.quantization import QuantizeOptions
from mlx_packs.bases.weight_formats import MLXFormat
from mlx_packs.bases.writer import quantize
from mlx_packs.convert.merge import merge_pack
from mlx_packs.packs.manifest import ADAPTERS
from mlx_packs.reading import read_json, sha256
from mlx_packs.runtime import mx
from tests.convert.conftest import edit_json
from tests.helpers.bitsandbytes import write_bitsandbytes
from tests.helpers.checkpoints import (
    SIZES,
    attached_logits,
    layout,
    logits,
    merged,
    write_checkpoint,
    write_quantized,
)
from tests.helpers.errors import raises
from tests.helpers.models import model_of
from tests.helpers.packs import random_pack, record_as_is
from tests.helpers.variants import slow_except

TARGETS = {
    "gpt2": ("c_attn", "attn.c_proj"),
    "qwen3_moe": ("q_proj", "switch_mlp.down_proj"),
}
FORMATS = {
    "affine": QuantizeOptions(MLXFormat("affine", 4, 32)),
    "affine8": QuantizeOptions(MLXFormat("affine", 8, 32)),
    "nf4": QuantizeOptions(NF4Format()),
}


def distance(pack: Pack, base: Path, out: Path) -> float:
    """The largest difference of a logit, merged and attached."""
    return np.abs(logits(load_base(out)) - attached_logits(pack, base)).max()


@pytest.fixture(scope="module")
def with_pack(tmp_path_factory):
    """A base by its format, and a pack on it; both are written once."""
    folder = tmp_path_factory.mktemp("bases")
    dense = write_checkpoint(folder / "dense")

    @cache
    def get(name: str) -> tuple[Path, Pack]:
        base = folder / name
        if name == "bitsandbytes":
            write_bitsandbytes(dense, base)
        elif name != "dense":
            quantize(dense, base, FORMATS[name])
        return base, random_pack(load_base(base)).save(folder / f"pack-{name}")

    return get


@pytest.mark.parametrize("family", slow_except(["qwen3", "gpt2", "qwen3_moe"], "gpt2", "qwen3_moe"))
def test_merge_of_a_dense_base_keeps_names_and_dtypes_and_the_forward(family, tmp_path):
    base = write_checkpoint(tmp_path / "base", family)
    targets = TARGETS.get(family, ("q_proj", "down_proj"))
    pack = random_pack(load_base(base), targets=targets).save(tmp_path / "pack")
    report = merged(pack, base, tmp_path / "out")
    assert layout(tmp_path / "out") == layout(base) and report["names"] == "base"
    measured = {"drift": report["kl_mean"], "max_drift": report["max_drift"]}
    assert report["verified"].items() >= measured.items()
    assert report["verified"]["measure"] == "KL in nats per token"
    assert distance(pack, base, base) > 0.05
    assert distance(pack, base, tmp_path / "out") < 1e-4
    assert report["kl_mean"] < 1e-6 and report["kl_of_pack"] > 1e-4
    assert read_json(tmp_path / "out" / "config.json") == read_json(base / "config.json")


def test_a_tied_head_and_bf16_stay_what_they_are(tmp_path):
    base = write_checkpoint(tmp_path / "base", dtype=mx.bfloat16, tie_word_embeddings=True)
    pack = random_pack(load_base(base)).save(tmp_path / "pack")
    merged(pack, base, tmp_path / "out")
    assert layout(tmp_path / "out") == layout(base)
    assert {dtype for dtype, _ in layout(base).values()} == {"BF16"}
    assert distance(pack, base, tmp_path / "out") < 0.05


@pytest.mark.parametrize("mode", slow_except(["affine", "nf4"], "affine"))
def test_merge_same_requantizes_what_changed_alone(mode, with_pack, tmp_path):
    base, pack = with_pack(mode)
    report = merged(pack, base, tmp_path / "out", requantize="same")
    assert layout(tmp_path / "out") == layout(base) and report["changed"] == 4
    before, after = (mx.load(str(f / "model.safetensors")) for f in (base, tmp_path / "out"))
    differ = {n.rpartition(".")[0] for n in before if not mx.array_equal(before[n], after[n])}
    assert differ == set(pack.specs)
    assert distance(pack, base, tmp_path / "out") < 0.5 * distance(pack, base, base)


@pytest.mark.parametrize("mode", slow_except(["affine", "nf4", "bitsandbytes"], "bitsandbytes"))
def test_a_quantized_base_becomes_dense(mode, with_pack, tmp_path):
    base, pack = with_pack(mode)
    merged(pack, base, tmp_path / "out", requantize="none")
    assert distance(pack, base, tmp_path / "out") < 1e-4
    assert not load_base(tmp_path / "out").quantization
    assert layout(tmp_path / "out") == layout(with_pack("dense")[0])


@pytest.mark.slow
def test_a_quantized_base_takes_more_bits_where_it_changes(with_pack, tmp_path):
    base, pack = with_pack("nf4")
    report = merged(pack, base, tmp_path / "out", requantize="affine8")
    assert distance(pack, base, tmp_path / "out") < 0.05
    quantization = read_json(tmp_path / "out" / "config.json")["quantization"]
    wanted = {"group_size": 64, "bits": 8, "mode": "affine"}
    assert all(quantization[path] == wanted for path in pack.specs)
    assert report["changed"] == 4  # the others keep their four bits


@pytest.mark.slow
def test_merge_quantizes_a_dense_base_and_shrinks_an_8_bit_one(with_pack, tmp_path):
    dense, pack = with_pack("dense")
    merged(pack, dense, tmp_path / "nf4", requantize="nf4")
    assert load_base(tmp_path / "nf4").quantization["bits"] == 4
    eight, pack = with_pack("affine8")
    report = merged(pack, eight, tmp_path / "less", requantize="affine4")
    size = sum(f.stat().st_size for f in eight.glob("*.safetensors"))
    assert report["changed"] == 16 and report["gb"] < 1e-9 * 0.75 * size
    assert np.isfinite(logits(load_base(tmp_path / "less"))).all()


@pytest.mark.slow
@pytest.mark.parametrize("requantize", slow_except(["none", "same"], "same"))
def test_merge_into_a_base_that_was_quantized_on_loading(requantize, with_pack, tmp_path):
    dense, _ = with_pack("dense")
    pack = random_pack(load_base(dense, quantize="nf4")).save(tmp_path / "pack")
    report = merged(pack, dense, tmp_path / "out", requantize=requantize)
    assert report["kl_mean"] < (1e-6 if requantize == "none" else 1e-2)
    assert bool(load_base(tmp_path / "out").quantization) == (requantize == "same")
    assert requantize == "same" or distance(pack, dense, tmp_path / "out") < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(("requantize", "limit"), [("same", 1.0), ("affine8", 0.1)])
def test_a_bitsandbytes_base_stays_nf4(requantize, limit, with_pack, tmp_path):
    base, pack = with_pack("bitsandbytes")
    report = merged(pack, base, tmp_path / "out", requantize=requantize)
    assert distance(pack, base, tmp_path / "out") < limit
    mode = read_json(tmp_path / "out" / "config.json")["quantization"]["mode"]
    assert (report["names"], mode) == ("mlx-lm", "nf4")


@pytest.mark.slow
def test_packed_experts_are_merged_and_not_into_nf4(tmp_path):
    base = write_quantized(tmp_path / "base", write_checkpoint(tmp_path / "d", "qwen3_moe"), 8)
    pack = random_pack(load_base(base), targets=TARGETS["qwen3_moe"]).save(tmp_path / "pack")
    merged(pack, base, tmp_path / "out", requantize="same")
    assert layout(tmp_path / "out") == layout(base)
    assert distance(pack, base, tmp_path / "out") < 0.05
    with raises("unsupported", "requantize", "switch_mlp"):
        merge_pack(pack, base, tmp_path / "nf4", requantize="nf4", rows=2)


def test_shards_and_dtype(with_pack, tmp_path):
    base, pack = with_pack("dense")
    report = merged(pack, base, tmp_path / "out", dtype="bfloat16", max_shard_gb=0.0005)
    assert report["shards"] > 1 and len(list((tmp_path / "out").glob("model-*"))) > 1
    result = layout(tmp_path / "out")
    assert {result[f"{path}.weight"][0] for path in pack.specs} == {"BF16"}
    assert result["model.norm.weight"][0] == "F32"


@pytest.mark.parametrize("requantize", slow_except(["same", "affine8"], "affine8"))
def test_stock_mlx_lm_loads_what_is_written(requantize, with_pack, tmp_path):
    base, pack = with_pack("affine")
    merged(pack, base, tmp_path / "out", requantize=requantize)
    model, _ = load_model(tmp_path / "out")
    expected = logits(load_base(tmp_path / "out"))
    assert np.abs(np.array(model(mx.arange(1, 33)[None])) - expected).max() < 1e-3


@pytest.mark.parametrize(
    ("own", "of_generation", "expected"),
    slow_except(
        [(4089, 4089, [4089, 4091]), ([4089], None, [4089, 4091]), ([4091, 4089], [4089], None)],
        (4089, 4089, [4089, 4091]),
    ),
)
def test_the_merged_model_names_what_ends_an_answer(own, of_generation, expected, tmp_path):
    base = write_checkpoint(tmp_path / "base")
    edit_json(base / "config.json", lambda c: c.update(eos_token_id=own))
    edit_json(base / "tokenizer_config.json", lambda c: c.update(eos_token="<|endoftext|>"))
    if of_generation is not None:
        stated = {"eos_token_id": of_generation, "top_k": 5}
        (base / "generation_config.json").write_text(json.dumps(stated))
    pack = random_pack(load_base(base)).save(tmp_path / "pack")
    merged(pack, base, tmp_path / "out")

    config = read_json(tmp_path / "out" / "config.json")
    assert config["eos_token_id"] == (expected or own)
    if of_generation is not None:
        generation = read_json(tmp_path / "out" / "generation_config.json")
        assert generation == {"eos_token_id": [4089, 4091], "top_k": 5}
    _, stock = mlx_lm.load(str(tmp_path / "out"))
    assert {4089, 4091} <= stock.eos_token_ids


@pytest.fixture(scope="module")
def faint(tmp_path_factory):
    """A 4-bit base and a pack whose deltas no merge in 4 bits keeps, in a folder."""
    folder = tmp_path_factory.mktemp("faint")
    base = write_quantized(folder / "base", write_checkpoint(folder / "dense"))
    return base, random_pack(load_base(base), 4, size=0.02).save(folder / "pack")


@pytest.fixture
def merge(faint, tmp_path, run):
    """Run `packs merge` of it into ``out``; the exit code, the report and the errors."""
    base, pack = faint
    args = ("merge", pack.path, "--model", base, "--rows", 2, "--out", tmp_path / "out", "--json")

    def go(*more):
        code, out, err = run(*args, *more)
        return code, json.loads(out), err

    return go


@pytest.mark.slow
def test_merge_that_four_bits_would_erase_names_the_bits_that_pass(merge, tmp_path):
    code, report, err = merge("--requantize", "same")
    assert code == 1 and "--max-drift" in err
    assert not report["passed"] and "verified" not in report
    assert report["kl_mean"] > 0.3 * report["kl_of_pack"]
    assert report["max_drift"] == max(2e-5, 0.1 * report["kl_of_pack"])
    assert report["passes"] in ("affine8", "none") and f"--requantize {report['passes']}" in err
    assert not list(tmp_path.iterdir())
    code, report, _ = merge("--requantize", report["passes"])
    assert code == 0 and report["passed"] and Path(report["out"]).is_dir()


@pytest.mark.parametrize("out", [".", "pack", "base/../base"])
def test_no_base_pack_or_folder_above_is_written_over(faint, out, run):
    base, pack = faint
    folder = base.parent
    before = {f: sha256(f) for f in folder.rglob("*") if f.is_file()}
    for more in ([], ["--overwrite"]):
        code, _, err = run("merge", pack.path, "--model", base, "--out", folder / out, *more)
        assert code == 2 and err.count("\n") == 1, err
    assert {f: sha256(f) for f in folder.rglob("*") if f.is_file()} == before


def test_bad_settings_another_base_and_a_link_to_the_own_are_named(faint, tmp_path):
    base, pack = faint
    with raises("unknown", "dtype", "int8"):
        merge_pack(pack, base, tmp_path / "out", dtype="int8")
    with raises("invalid", "max_drift", "nan"):
        merge_pack(pack, base, tmp_path / "out", max_drift=float("nan"))
    with raises("mismatch", None, str(pack.path), "tiny"):
        merge_pack(pack, "tiny", tmp_path / "out")
    (tmp_path / "link").symlink_to(base)
    with raises("conflict", "out"):
        merge_pack(pack, base, tmp_path / "link", overwrite=True)


def test_nan_in_the_pack_stops_the_merge(faint, tmp_path):
    base, pack = faint
    folder = shutil.copytree(pack.path, tmp_path / "pack")
    bad = dict(pack.load_tensors())
    name = next(iter(bad))
    bad[name] = mx.full(bad[name].shape, float("nan"))
    mx.save_safetensors(str(folder / ADAPTERS), bad)
    record_as_is(folder)
    with raises("unreadable", None, name):
        merge_pack(folder, base, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_mxfp8_is_not_written_and_says_what_is(tmp_path):
    folder = write_checkpoint(tmp_path / "base")
    model, config = model_of("qwen3", **SIZES)
    nn.quantize(model, 32, 8, mode="mxfp8")
    config["quantization"] = {"group_size": 32, "bits": 8, "mode": "mxfp8"}
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps(config))
    pack = random_pack(load_base(folder)).save(tmp_path / "pack")
    with raises("unsupported", "requantize", "mxfp8", "q_proj"):
        merge_pack(pack, folder, tmp_path / "same", requantize="same", rows=2)
    merged(pack, folder, tmp_path / "out", requantize="affine8")
    assert distance(pack, folder, tmp_path / "out") < 0.05


def test_a_pack_is_merged_and_exported_by_its_methods_into_its_own_base_or_another(here):
    pack = random_pack(load_base(write_checkpoint(here / "base"))).save("pack")
    few = {"rows": 2, "max_drift": 10.0, "progress": False}
    assert pack.merge("own", **few)["model"] == "base"
    merge_pack("pack", load_base("base"), "loaded", **few)
    own, loaded = (Path(folder, "model.safetensors").read_bytes() for folder in ("own", "loaded"))
    assert own == loaded
    assert pack.export("peft", "peft")["to"] == "peft"
