"""A base in NF4: modules, loading, matmul paths, attaching, merging; quantizing while loading."""

import json
import shutil
from pathlib import Path

import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from benchmarks.workloads import PASSAGES
from mlx_packs import LoRAConfig, Pack, TrainConfig, load_base, train_pack
from mlx_packs.adapters.attach import attach
from mlx_packs.bases.bitsandbytes import config_of, to_bitsandbytes
from mlx_packs.bases.files import tiny_checkpoint
from mlx_packs.bases.geometry import probe
from mlx_packs.nn.frozen_weight import frozen_weight
from mlx_packs.nn.nf4 import NF4Embedding, NF4Linear
from mlx_packs.nn.quantized import dense_module, quantized_modules
from mlx_packs.nn.surgery import replace_modules
from mlx_packs.objectives.causal_lm import split_head
from mlx_packs.ops import nf4
from mlx_packs.packs.base import load_base_for
from mlx_packs.runtime import mx
from tests.helpers.errors import check, raises
from tests.helpers.packs import merged_weights
from tests.helpers.rows import CHATS, write_rows


def save_checkpoint(folder: Path, tensors: dict, **config) -> Path:
    """The tiny base's folder with other tensors."""
    folder.mkdir()
    for file in tiny_checkpoint().iterdir():
        if file.suffix != ".safetensors" and "index" not in file.name:
            shutil.copy(file, folder)
    known = json.loads((folder / "config.json").read_text())
    known = {k: v for k, v in known.items() if not k.startswith("quantization")} | config
    (folder / "config.json").write_text(json.dumps(known))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "mlx"})
    return folder


@pytest.fixture(scope="module")
def bf16_tiny(tmp_path_factory) -> Path:
    """The tiny base, dequantized, as an ordinary bf16 checkpoint."""
    model = load_base("tiny").model
    replace_modules(model, [(path, dense_module(m)) for path, m in quantized_modules(model)])
    tensors = {name: t.astype(mx.bfloat16) for name, t in tree_flatten(model.parameters())}
    return save_checkpoint(tmp_path_factory.mktemp("dense") / "base", tensors)


@pytest.fixture(scope="module")
def stored(bf16_tiny, tmp_path_factory) -> Path:
    """The same in NF4 on disk, double-quantized, and its config."""
    base = load_base(bf16_tiny, "nf4")
    tensors = dict(tree_flatten(base.model.parameters()))
    config = {"quantization": base.quantization}
    return save_checkpoint(tmp_path_factory.mktemp("stored") / "base", tensors, **config)


TOKENS = mx.array([[5, 9, 300, 41, 7, 2, 3, 3900]])


@pytest.mark.parametrize("double_quant", [True, False])
def test_a_dense_checkpoint_is_quantized_as_it_is_loaded(bf16_tiny, double_quant):
    base = load_base(bf16_tiny, "nf4", double_quant=double_quant)
    reference = load_base(bf16_tiny)
    packed = quantized_modules(base.model)
    assert len(packed) == 6 * 7 + 1
    for path, module in packed:
        weight = dict(reference.model.named_modules())[path].weight
        assert module.double_quant == double_quant and module.dtype == mx.float32
        wanted = nf4.dequantize(nf4.quantize(weight, 64, double_quant), mx.float32)
        assert mx.array_equal(frozen_weight(module).dense(), wanted).item()
    assert split_head(base.model) is not None  # so the loss is on supervised rows alone
    logits, dense_logits = base.model(TOKENS), reference.model(TOKENS)
    assert mx.abs(logits - dense_logits).mean() < 0.1 * mx.abs(dense_logits).mean()
    double = " double-quantized" if double_quant else ""
    assert f"nf4 4-bit g64{double}" in base.summary()


@pytest.mark.parametrize("double_quant, wanted", [(True, 4.127), (False, 4.5)])
def test_bits_per_weight_in_memory(bf16_tiny, double_quant, wanted):
    modules = quantized_modules(load_base(bf16_tiny, "nf4", double_quant=double_quant).model)
    bits = 8 * sum(m.nf4_weight.nbytes for _, m in modules)
    assert bits / sum(np.prod(m.nf4_weight.shape) for _, m in modules) == pytest.approx(
        wanted, abs=0.02
    )


def test_stored_base_has_the_logits_of_one_quantized_on_loading(bf16_tiny, stored):
    base, result = load_base(stored), load_base(bf16_tiny, "nf4")
    assert base.quantization == result.quantization
    assert isinstance(base.model.model.embed_tokens, NF4Embedding)
    assert mx.array_equal(base.model(TOKENS), result.model(TOKENS)).item()


def test_bitsandbytes_checkpoint_is_read_without_quantizing_again(bf16_tiny, tmp_path):
    result = load_base(bf16_tiny, "nf4", keep=("embed_tokens",))
    tensors = {}
    for name, tensor in tree_flatten(result.model.parameters()):
        path, _, part = name.rpartition(".")
        module = dict(result.model.named_modules())[path]
        if not isinstance(module, NF4Linear):
            tensors[name] = tensor.astype(mx.bfloat16)
        elif part == "weight":
            tensors |= to_bitsandbytes(name, module.nf4_weight, "bfloat16")
    config = {"quantization_config": config_of(True, "bfloat16", ["lm_head"])}
    folder = save_checkpoint(tmp_path / "bnb", tensors, **config)
    base = load_base(folder)
    assert base.quantization == {
        "group_size": 64,
        "bits": 4,
        "mode": "nf4",
        "double_quant": True,
    }
    assert mx.array_equal(base.model(TOKENS), result.model(TOKENS)).item()
    asked = load_base(folder, "nf4", keep=("lm_head", "embed_tokens"))  # as a bnb_4bit recipe does
    assert asked.quantization == base.quantization
    data = write_rows(tmp_path / "d", train=CHATS, valid=CHATS[:2])
    train = TrainConfig(iters=1, batch_size=1, max_seq_length=64, matmul_path="dense")
    train_pack(str(folder), data, LoRAConfig(rank=2), train, tmp_path / "p")
    with load_base_for(Pack.open(tmp_path / "p"), folder).applied(tmp_path / "p"):
        pass


def test_modules_are_left_dense_by_name(bf16_tiny, tmp_path):
    base = load_base(bf16_tiny, "nf4", keep=("down_proj", "lm_head", "embed_tokens"))
    modules = dict(base.model.named_modules())
    assert type(modules["model.embed_tokens"]) is nn.Embedding
    assert type(modules["model.layers.3.mlp.down_proj"]) is nn.Linear
    assert type(modules["model.layers.3.mlp.up_proj"]) is NF4Linear
    assert "nf4 4-bit g64 double-quantized without down_proj, lm_head, embed" in base.summary()
    with raises("unknown", "keep", "down_prj", "'down_proj'"):
        load_base(bf16_tiny, "nf4", keep=("down_prj",))
    train = TrainConfig(
        iters=1,
        batch_size=1,
        max_seq_length=64,
        matmul_path="transient",
        quantize="affine4",
        keep=("down_proj",),
    )
    data = write_rows(tmp_path / "d", train=CHATS, valid=CHATS[:2])
    train_pack(str(bf16_tiny), data, LoRAConfig(rank=2), train, tmp_path / "p")
    again = load_base_for(Pack.open(tmp_path / "p"), bf16_tiny)
    assert type(again.model.layers[0].mlp.down_proj) is nn.Linear


def test_embedding_rows_are_those_of_the_dense_table():
    for width, block in ((128, 64), (96, 64), (40, 32)):  # blocks inside and across rows
        for double_quant in (True, False):
            table = nn.Embedding(37, width)
            packed = NF4Embedding.from_embedding(table, block, double_quant)
            tokens = mx.array([[0, 36, 5], [5, 5, 21]])
            assert mx.array_equal(packed(tokens), frozen_weight(packed).dense()[tokens]).item()
            x = mx.random.normal((3, width))
            assert mx.allclose(
                packed.as_linear(x), x @ frozen_weight(packed).dense().T, atol=1e-4
            ).item()


def test_a_linear_with_bias_is_its_dequantized_self():
    linear = nn.Linear(96, 40)
    packed = NF4Linear.from_linear(linear)
    x = mx.random.normal((2, 5, 96))
    wanted = x @ frozen_weight(packed).dense().T + linear.bias
    assert mx.allclose(packed(x), wanted, atol=1e-5).item()
    assert not packed.trainable_parameters() and "double-quantized" in repr(packed)


def test_probe_names_quantized_tensors_that_do_not_fit(bf16_tiny):
    base = load_base(bf16_tiny, "nf4")
    module = base.model.layers[0].self_attn.q_proj
    result = probe("q_proj", module, base.config)
    assert (result.in_features, result.out_features, result.stored_width) == (256, 512, 128)
    assert "nf4 4-bit g64, stored width 128 = 256 x 4 / 8" in result.describe()
    module.absmax = module.absmax[:-1]
    with raises("unreadable", None, "q_proj", "absmax"):
        probe("q_proj", module, base.config)


@pytest.mark.parametrize("matmul_path", ["quantized", "transient", "dense"])
def test_gradients_on_nf4_are_those_on_the_dequantized_base(bf16_tiny, matmul_path):
    def gradients(base, path):
        attached = attach(base, LoRAConfig(rank=4), matmul_path=path)
        for slot in attached.slots.values():
            slot.lora.lora_b = [
                mx.random.normal(b.shape, key=mx.random.key(b.size)) * 0.05
                for b in slot.lora.lora_b
            ]
        base.model.train()
        batch = (TOKENS[:, :-1], TOKENS[:, 1:], mx.ones(TOKENS[:, 1:].shape))
        loss = nn.value_and_grad(
            base.model, lambda: mx.mean(nn.losses.cross_entropy(base.model(batch[0]), batch[1]))
        )
        value, grads = loss()
        attached.detach()
        return value.item(), dict(tree_flatten(grads))

    base = load_base(bf16_tiny, "nf4")
    plain = load_base(bf16_tiny)
    packed = dict(quantized_modules(base.model))
    replace_modules(plain.model, [(path, dense_module(m)) for path, m in packed.items()])
    value, result = gradients(base, matmul_path)
    wanted_value, wanted = gradients(plain, "quantized")
    assert value == pytest.approx(wanted_value, rel=1e-5)
    assert set(result) == set(wanted) and len(result) == 2 * 6 * 7
    for name, gradient in wanted.items():
        largest = mx.abs(gradient).max().item()
        assert mx.abs(result[name] - gradient).max().item() <= 1e-4 * largest, name


def test_merging_is_exact_and_detaching_leaves_no_trace(stored):
    base = load_base(stored)
    before = base.model(TOKENS)
    attached = attach(base, LoRAConfig(rank=2), matmul_path="dense")
    for slot in attached.slots.values():
        slot.lora.lora_b = [mx.ones(b.shape) * 0.01 for b in slot.lora.lora_b]
    with_pack = base.model(TOKENS)
    merged = merged_weights(attached)
    attached.detach()
    assert mx.array_equal(base.model(TOKENS), before).item()
    linears = dict(base.model.named_modules())
    replaced = []
    for path, weight in merged.items():
        linear = nn.Linear(1, 1, bias=False)
        linear.weight = weight
        replaced.append((path, linear))
        assert isinstance(linears[path], NF4Linear)
    replace_modules(base.model, replaced)
    assert mx.allclose(base.model(TOKENS), with_pack, atol=1e-3).item()


def test_a_pack_is_trained_saved_and_applied_on_nf4(bf16_tiny, stored, tmp_path):
    train = TrainConfig(
        iters=3,
        batch_size=2,
        max_seq_length=64,
        val_batches=0,
        test_batches=1,
        quantize="nf4",
        double_quant=False,
        matmul_path="quantized",
    )
    data = write_rows(tmp_path / "d", train=CHATS, valid=CHATS[:2])
    run = train_pack(str(bf16_tiny), data, LoRAConfig(rank=2), train, tmp_path / "p")
    manifest = run.pack.manifest
    assert manifest["base"]["quantization"] == {
        "group_size": 64,
        "bits": 4,
        "mode": "nf4",
        "double_quant": False,
    }
    pack = Pack.open(tmp_path / "p")
    base = load_base_for(pack, bf16_tiny)
    assert not base.model.layers[0].self_attn.q_proj.double_quant
    with base.applied(pack):
        pass
    with raises("mismatch", None, "nf4 4-bit g64,", "nf4 4-bit g64 double-quantized"):
        pack.attach(load_base(bf16_tiny, "nf4"))
    with raises("mismatch", None, str(stored)):
        load_base_for(pack, stored)
    train = TrainConfig(iters=1, batch_size=1, max_seq_length=64, matmul_path="quantized")
    run = train_pack(str(stored), data, LoRAConfig(rank=2), train, tmp_path / "q")
    with load_base_for(Pack.open(tmp_path / "q"), stored).applied(tmp_path / "q"):
        pass


BROKEN = {
    "absmax of another size": ("absmax", lambda t: t[:-3], "q_proj: "),
    "weight of another size": ("weight", lambda t: t[:-8], "q_proj"),
    "NaN in nested absmax": (
        "nested_absmax",
        lambda t: t * float("nan"),
        "q_proj.nested_absmax",
    ),
    "infinite offset": ("offset", lambda t: t + float("inf"), "q_proj.offset"),
    "no absmax": ("absmax", None, "q_proj.absmax"),
    "no weight": ("weight", None, "q_proj.weight"),
    "no offset": ("offset", None, "'offset'"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_quantized_tensors_are_named(stored, tmp_path, name):
    part, change, named = BROKEN[name]
    tensors = mx.load(str(stored / "model.safetensors"))
    key = f"model.layers.0.self_attn.q_proj.{part}"
    if change is None:
        del tensors[key]
    else:
        tensors[key] = change(tensors[key])
    folder = save_checkpoint(
        tmp_path / "b",
        tensors,
        quantization=json.loads((stored / "config.json").read_text())["quantization"],
    )
    with raises("unreadable", None, "q_proj", named) as error:
        load_base(folder)
    assert error.value.message.startswith(f"{folder}: ")


@pytest.mark.parametrize("double_quant, part", [(True, "nested_absmax"), (False, "absmax")])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_absmax_of_bitsandbytes_that_is_not_finite_is_named(
    bf16_tiny, tmp_path, double_quant, part, bad
):
    tensors = mx.load(str(bf16_tiny / "model.safetensors"))
    name = "model.layers.2.mlp.up_proj.weight"
    packed = nf4.quantize(tensors.pop(name), 64, double_quant)
    tensors |= to_bitsandbytes(name, packed, "bfloat16")
    tensors[f"{name}.{part}"][3] = bad
    config = {"quantization_config": config_of(double_quant, "bfloat16", [])}
    folder = save_checkpoint(tmp_path / "bnb", tensors, **config)
    with raises("unreadable", None, str(folder), f"layers.2.mlp.up_proj.{part}"):
        load_base(folder)


def test_quantize_rejects_quantized_bases_and_flags_of_other_modes(stored, run):
    with raises("conflict", "quantize", "affine4", "nf4 4-bit g64 double"):
        load_base(stored, "affine4")
    assert load_base(stored, "nf4").quantization == load_base(stored).quantization
    with raises("conflict", "double_quant", str(stored)):
        load_base(stored, "nf4", double_quant=False)
    with raises("conflict", "keep", "down_proj", str(stored)):
        load_base(stored, "nf4", keep=("down_proj",))
    for mode in ("none", "affine4"):
        code, out, _ = run("train", "--quantize", mode, "--no-double-quant")
        assert (code, out) == (2, "")
        check(run.error, "conflict", "double_quant", "--quantize nf4")


@pytest.mark.slow
def test_200_steps_on_nf4_end_within_two_percent_of_affine_4_bit(bf16_tiny, tmp_path):
    result = {}
    for mode in ("affine4", "nf4"):
        train = TrainConfig(
            iters=200,
            batch_size=2,
            max_seq_length=128,
            learning_rate=1e-3,
            val_batches=0,
            quantize=mode,
            matmul_path="dense",
        )
        run = train_pack(str(bf16_tiny), PASSAGES, LoRAConfig(rank=16), train, tmp_path / mode)
        result[mode] = run.report
        print(mode, {k: v for k, v in run.report.items() if k.startswith("ppl")})
    assert result["nf4"]["ppl_after"] < 0.7 * result["nf4"]["ppl_before"]
    assert result["nf4"]["ppl_after"] == pytest.approx(result["affine4"]["ppl_after"], rel=0.02)
