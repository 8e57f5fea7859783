"""Checkpoint to checkpoint: what is written, that it is written completely, and what is rejected."""

import json
import os
from pathlib import Path

import pytest
from mlx_lm.convert import convert

from mlx_packs import files
from mlx_packs.bases import files as base_files
from mlx_packs.bases import weight_formats
from mlx_packs.bases import writer as quantize
from mlx_packs.bases.nf4 import NF4Format
from mlx_packs.bases.quantization import QuantizeOptions
from mlx_packs.bases.weight_formats import MLXFormat
from mlx_packs.ops import nf4
from mlx_packs.packs.base import load_base
from mlx_packs.reading import sha256
from mlx_packs.runtime import mx
from tests.bases.changes import change_tensors, tensors_of
from tests.helpers.bitsandbytes import write_bitsandbytes
from tests.helpers.checkpoints import TOKENIZER_FILES, TOKENS, write_dense
from tests.helpers.damage import flip_bit
from tests.helpers.errors import check, raises

SMALL_SHARDS = 2e-5  # GB; a few modules each
SMALL = QuantizeOptions(max_shard_gb=SMALL_SHARDS)


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and mx.array_equal(a[name], b[name]).item() for name in a
    )


@pytest.fixture
def dense(tmp_path) -> Path:
    return write_dense(tmp_path / "dense")


@pytest.fixture
def quantize_rejected(run, tmp_path):
    """A function that asserts that a command fails in one line and leaves nothing behind."""

    def go(code: str, flag: str | None, names: tuple[str, ...], *args) -> None:
        before = sorted(tmp_path.rglob("*"))
        status, out, err = run("quantize", "--out", tmp_path / "out", *args)
        lines = [line for line in err.splitlines() if line.startswith("packs: ")]
        assert status == 2 and not out and len(lines) == 1, err
        assert sorted(tmp_path.rglob("*")) == before
        check(run.error, code, flag, *names)

    return go


@pytest.mark.parametrize("bits, group_size", [(4, 64), (3, 32)])
def test_affine_is_what_mlx_lm_convert_writes(dense, tmp_path, bits, group_size):
    convert(str(dense), tmp_path / "theirs", True, group_size, bits)
    options = QuantizeOptions(MLXFormat("affine", bits, group_size), max_shard_gb=SMALL_SHARDS)
    quantize.quantize(dense, tmp_path / "ours", options)
    assert same(tensors_of(tmp_path / "ours"), tensors_of(tmp_path / "theirs"))
    ours, theirs = (
        json.loads((tmp_path / who / "config.json").read_text()) for who in ("ours", "theirs")
    )
    for key in ("quantization", "quantization_config"):
        assert ours[key] == theirs[key]


@pytest.mark.parametrize("double_quant, bits", [(True, 4.13), (False, 4.50)])
def test_bits_per_weight_on_disk(dense, tmp_path, double_quant, bits):
    options = QuantizeOptions(NF4Format(double_quant=double_quant))
    report = quantize.quantize(dense, tmp_path / "q", options)
    before, written = tensors_of(dense), tensors_of(tmp_path / "q")
    paths = {name.removesuffix(".absmax") for name in written if name.endswith(".absmax")}
    stored = sum(t.nbytes for name, t in written.items() if name.rpartition(".")[0] in paths)
    measured = 8 * stored / sum(before[f"{path}.weight"].size for path in paths)
    assert measured == pytest.approx(bits, abs=0.02)
    assert report["bits_per_quantized_weight"] == pytest.approx(measured, abs=1e-4)


@pytest.mark.parametrize(("shape", "double_quant"), [((37, 72), True), ((64, 90), False)])
def test_slices_give_the_bits_of_the_whole(monkeypatch, shape, double_quant):
    monkeypatch.setattr(weight_formats, "_SLICE", 500)
    w = mx.random.normal(shape).astype(mx.bfloat16)
    whole = nf4.quantize(w, 64, double_quant)
    result = NF4Format(double_quant=double_quant).quantize("p.weight", w)
    for name in ("weight", "absmax", "nested_absmax", "offset"):
        part = getattr(whole, name)
        assert part is None or mx.array_equal(result.pop(f"p.{name}"), part).item()
    assert not result


def test_mixed_recipes_keep_modules_dense_or_give_them_other_bits(dense, tmp_path, run):
    arguments = ("--keep", "embed_tokens,layers.0.mlp.up_proj", "--bits-for", "down_proj|lm_head=8")
    places = ("--model", dense, "--out", tmp_path / "q")
    code, out, err = run("quantize", *places, *arguments, "--json")
    assert code == 0, err
    assert json.loads(out)["quantized"] == 14

    stated = json.loads((tmp_path / "q" / "config.json").read_text())["quantization"]
    assert stated.pop("model.embed_tokens") is False
    assert stated.pop("model.layers.0.mlp.up_proj") is False
    assert stated.pop("lm_head") == {"group_size": 64, "bits": 8, "mode": "affine"}

    tensors = tensors_of(tmp_path / "q")
    assert tensors["model.embed_tokens.weight"].dtype == mx.bfloat16
    assert tensors["model.layers.1.mlp.down_proj.weight"].dtype == mx.uint32

    base = load_base(tmp_path / "q")
    packed = {path: type(module).__name__ for path, module in base.model.named_modules()}
    assert packed["lm_head"] == "QuantizedLinear"
    assert packed["model.layers.0.mlp.up_proj"] == "Linear"
    assert packed["model.layers.1.mlp.up_proj"] == "NF4Linear"
    assert mx.isfinite(base.model(TOKENS)).all().item()


def test_quantize_writes_index_tokenizer_and_hashes(dense, tmp_path):
    out = tmp_path / "q"
    report = quantize.quantize(dense, out, SMALL)
    shards = sorted(out.glob("model*.safetensors"))
    assert len(shards) == report["shards"] > 3

    index = json.loads((out / "model.safetensors.index.json").read_text())
    for shard in shards:
        for name in mx.load(str(shard)):
            assert index["weight_map"].pop(name) == shard.name
    assert not index["weight_map"]

    record = json.loads((out / base_files.RECORD).read_text())
    assert {name: facts["sha256"] for name, facts in record["files"].items()} == {
        shard.name: sha256(shard) for shard in shards
    }

    for name in TOKENIZER_FILES:
        assert (out / name).read_bytes() == (dense / name).read_bytes()


def test_an_interrupted_run_leaves_nothing(dense, tmp_path, monkeypatch):
    real, calls = NF4Format.quantize, []

    def stop(*args):
        calls.append(args)
        if len(calls) == 9:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(NF4Format, "quantize", stop)
    with pytest.raises(KeyboardInterrupt):
        quantize.quantize(dense, tmp_path / "q", SMALL)
    assert [f.name for f in tmp_path.iterdir()] == ["dense"]


def test_one_run_at_a_time_writes_a_folder(dense, tmp_path, quantize_rejected):
    with files.exclusive_writer(tmp_path / "out"):
        quantize_rejected("busy", None, (str(tmp_path / "out"),), "--model", dense)
        quantize.quantize(dense, tmp_path / "other")
    (tmp_path / ".out.lock").touch()  # of a run that was killed
    quantize.quantize(dense, tmp_path / "out")
    assert sorted(f.name for f in tmp_path.iterdir()) == ["dense", "other", "out"]


def test_a_folder_that_appeared_meanwhile_is_not_replaced(dense, tmp_path, monkeypatch):
    real = quantize.plan_quantized

    def slow(*args):
        monkeypatch.setattr(quantize, "plan_quantized", real)
        quantize.quantize(dense, tmp_path / "q")
        return real(*args)

    monkeypatch.setattr(quantize, "plan_quantized", slow)
    with raises("exists", "out", str(tmp_path / "q")):
        quantize.quantize(dense, tmp_path / "q", QuantizeOptions(MLXFormat()))
    assert quantize.verify(tmp_path / "q")["quantization"]["mode"] == "nf4"


def test_inspect_holds_every_shard_against_its_hash(dense, tmp_path, run):
    out = tmp_path / "q"
    quantize.quantize(dense, out, SMALL)
    code, shown, _ = run("inspect", out)
    shards = sorted(out.glob("model*.safetensors"))
    assert code == 0 and shown.count(" ok\n") == len(shards)
    assert shown.startswith("base    ") and "nf4 4-bit g64 double-quantized" in shown
    code, shown, _ = run("inspect", out, "--json")
    assert json.loads(shown).items() >= json.loads((out / base_files.RECORD).read_text()).items()
    flip_bit(shards[1], 8 * shards[1].stat().st_size - 1)
    load_base(out)  # reads no hash
    code, shown, err = run("inspect", out)
    assert (code, shown) == (2, "") and len(err.splitlines()) == 1
    check(run.error, "unreadable", None, str(shards[1]), "sha256", "quantization.json")


def test_a_shard_of_another_size_is_rejected_when_it_is_loaded(dense, tmp_path):
    quantize.quantize(dense, tmp_path / "q", SMALL)
    shard = sorted((tmp_path / "q").glob("model*.safetensors"))[2]
    shard.write_bytes(shard.read_bytes() + b"more")
    with raises("unreadable", None, str(shard), "quantization.json"):
        load_base(tmp_path / "q")
    (tmp_path / "q" / "model.safetensors.index.json").unlink()
    shard.unlink()
    with raises("unreadable", None, shard.name, "quantization.json"):
        load_base(tmp_path / "q")


def test_a_folder_that_is_there_is_replaced_only_with_overwrite(
    dense, tmp_path, run, quantize_rejected
):
    arguments = ("--model", dense, "--out", tmp_path / "q")
    assert run("quantize", *arguments)[0] == 0
    quantize_rejected("exists", "out", (str(tmp_path / "q"), "--overwrite"), *arguments)
    assert run("quantize", *arguments, "--mode", "affine", "--overwrite")[0] == 0
    assert quantize.verify(tmp_path / "q")["quantization"]["mode"] == "affine"
    assert sorted(f.name for f in tmp_path.iterdir()) == ["dense", "q"]


def test_modules_with_bias_are_quantized_and_the_bias_stays(tmp_path):
    folder = write_dense(tmp_path / "dense", family="qwen2")
    quantize.quantize(folder, tmp_path / "q")
    result = tensors_of(tmp_path / "q")
    name = "model.layers.0.self_attn.q_proj"
    assert result[f"{name}.weight"].dtype == mx.uint8
    assert same({"b": result[f"{name}.bias"]}, {"b": tensors_of(folder)[f"{name}.bias"]})
    assert mx.isfinite(load_base(tmp_path / "q").model(TOKENS)).all().item()


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_a_weight_that_is_not_finite_is_named(dense, quantize_rejected, name):
    change_tensors(dense, lambda tensors: tensors.update({name: tensors[name] * float("nan")}))
    quantize_rejected("unreadable", None, (name,), "--model", dense)


def test_what_is_quantized_already_is_rejected_with_what_it_is(
    dense, tmp_path, quantize_rejected, run
):
    config = json.loads((dense / "config.json").read_text())
    replace = ("--out", tmp_path / "q", "--overwrite")
    theirs = write_bitsandbytes(dense, tmp_path / "theirs")
    quantize_rejected("conflict", "model", ("(bitsandbytes nf4)",), "--model", theirs)
    run("quantize", "--model", dense, *replace, "--mode", "nf4")
    kind = "(nf4 4-bit g64 double-quantized)"
    quantize_rejected("conflict", "model", (kind,), "--model", tmp_path / "q")
    (tmp_path / "q" / "config.json").write_text(json.dumps(config))
    quantize_rejected("conflict", "model", (".weight is U8",), "--model", tmp_path / "q")


def test_a_full_disk_leaves_nothing_behind(dense, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with raises("unwritable", None, "No space left on device"):
        quantize.quantize(dense, tmp_path / "q")
    assert [f.name for f in tmp_path.iterdir()] == ["dense"]


def test_modules_left_dense_are_named_with_the_reason(tmp_path, run):
    folder = write_dense(tmp_path / "dense", intermediate_size=33)
    arguments = ("--model", folder, "--out", tmp_path / "q")
    code, out, _ = run("quantize", *arguments, "--keep", "q_proj")
    lines = [line for line in out.splitlines() if line.startswith("dense")]
    assert code == 0 and lines == [
        f"dense   {', '.join(f'model.layers.{i}.{name}' for i in range(2))} ({why})"
        for name, why in (
            ("self_attn.q_proj", "kept by name"),
            ("mlp.down_proj", "width 33 is no multiple of 2"),
        )
    ]


def test_a_folder_with_the_source_is_not_replaced(dense, quantize_rejected, monkeypatch):
    (dense.parent / "thesis.txt").write_text("mine")
    replace = ("--model", dense, "--overwrite", "--out")
    quantize_rejected("conflict", "out", (str(dense.parent),), *replace, dense.parent)
    monkeypatch.chdir(dense)
    quantize_rejected("conflict", "out", (".",), *replace, ".")
