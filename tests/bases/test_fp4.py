"""Bases in mxfp4 and nvfp4: what they compute is what their dequantized weights compute."""

import numpy as np
import pytest
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.utils import load_model

from mlx_packs import load_base
from mlx_packs.bases.quantization import format_after
from mlx_packs.config.choices import MATMUL_PATHS, weight_modes_of
from mlx_packs.convert.merge import merge_pack
from mlx_packs.nn.frozen_weight import frozen_weight, with_dense_dtype
from mlx_packs.nn.quantized import dense_module, quantized_modules
from mlx_packs.runtime import mx
from tests.bases.changes import change_tensors, set_keys
from tests.helpers.checkpoints import TOKENS, attached_logits, layout, logits
from tests.helpers.errors import raises
from tests.helpers.fp4 import (
    GROUP_SIZES,
    dequantized,
    write_dequantized,
    write_fp4,
    write_gpt_oss,
)
from tests.helpers.packs import random_pack
from tests.helpers.steps import largest_difference, lora_loss_and_gradients
from tests.helpers.variants import slow_except

NVFP4 = {"group_size": 16, "bits": 4, "mode": "nvfp4"}


@pytest.mark.parametrize("mode", slow_except(GROUP_SIZES, "mxfp4"))
def test_loss_and_gradient_are_those_of_the_dequantized_weights(tmp_path, mode):
    folder = write_fp4(tmp_path / "fp4", mode)
    loss, gradient = lora_loss_and_gradients(write_dequantized(tmp_path / "dense", folder), "dense")
    largest = max(mx.abs(g).max().item() for g in gradient.values())
    for path in MATMUL_PATHS:
        result, gradient_of_path = lora_loss_and_gradients(folder, path)
        assert abs(result - loss) < 1e-5 * loss, path
        assert largest_difference(gradient_of_path, gradient) < 1e-5 * largest, path


@pytest.mark.parametrize("mode", GROUP_SIZES)
@pytest.mark.parametrize("dtype", slow_except(["float32", "float16", "bfloat16"], "bfloat16"))
def test_weights_are_dense_in_the_dtype_of_activations(tmp_path, mode, dtype, monkeypatch):
    monkeypatch.setattr("mlx_packs.runtime.on_cpu", lambda: False)
    base = load_base(write_fp4(tmp_path / "fp4", mode), compute_dtype=dtype)
    embedding = base.model.model.embed_tokens
    expected = getattr(mx, dtype)
    assert embedding(mx.array([1, 2])).dtype == base.model(mx.array([[1, 2]])).dtype == expected

    for path, module in quantized_modules(base.model):
        weight = frozen_weight(module)
        stored = np.array(module.weight), np.array(module.scales)
        assert weight.dtype == weight.dense().dtype == weight.rows(slice(2)).dtype == expected
        dense = np.array(dense_module(module).weight.astype(mx.float32))
        assert np.array_equal(dense, dequantized(*stored, mode)), path


@pytest.mark.parametrize("mode", slow_except(GROUP_SIZES, "nvfp4"))
def test_a_merge_is_stored_as_the_base_and_read_by_mlx_lm(tmp_path, mode):
    folder = write_fp4(tmp_path / "fp4", mode)
    pack = random_pack(load_base(folder), size=0.3).save(tmp_path / "pack")
    attached = attached_logits(pack, folder)
    report = merge_pack(pack, folder, tmp_path / "same", requantize="same", rows=2, max_drift=9.0)
    assert report["changed"] == 4
    assert layout(tmp_path / "same") == layout(folder)

    before = mx.load(str(folder / "model.safetensors"))
    after = mx.load(str(tmp_path / "same" / "model.safetensors"))
    changed = {name for name in before if not mx.array_equal(before[name], after[name])}
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "down_proj"}

    stock, _ = load_model(tmp_path / "same")
    merged = load_base(tmp_path / "same")
    assert merged.quantization["mode"] == mode
    assert mx.allclose(stock(TOKENS).astype(mx.float32), merged.model(TOKENS), atol=0.05)
    own = np.abs(attached - logits(load_base(folder))).max()
    assert np.abs(logits(merged) - attached).max() < own / 2


@pytest.mark.parametrize("mode", slow_except(GROUP_SIZES, "nvfp4"))
def test_quantizing_dequantized_weights_again_changes_nothing(tmp_path, mode, run):
    dense = write_dequantized(tmp_path / "dense", write_fp4(tmp_path / "fp4", mode))
    assert run("quantize", "--model", dense, "--mode", mode, "--out", tmp_path / "again")[0] == 0

    again = load_base(tmp_path / "again")
    assert again.quantization == load_base(tmp_path / "fp4").quantization
    assert np.array_equal(logits(again), logits(load_base(tmp_path / "fp4")))
    on_loading = load_base(dense, quantize=mode)
    assert np.array_equal(logits(on_loading), logits(again))


@pytest.mark.slow
def test_experts_of_gpt_oss_are_trained_and_merged_in_mxfp4(tmp_path):
    folder = tmp_path / "gpt-oss"
    write_gpt_oss(folder, tmp_path / "dense")
    targets = ("q_proj", "gate_proj", "up_proj", "down_proj")
    loss, gradient = lora_loss_and_gradients(tmp_path / "dense", "dense", targets)
    largest = max(mx.abs(g).max().item() for g in gradient.values())
    for path in MATMUL_PATHS:
        result, gradient_of_path = lora_loss_and_gradients(folder, path, targets)
        assert abs(result - loss) < 1e-5 * loss, path
        assert largest_difference(gradient_of_path, gradient) < 1e-5 * largest, path

    pack = random_pack(load_base(folder), targets=targets).save(tmp_path / "pack")
    expected = attached_logits(pack, folder)
    merge_pack(pack, folder, tmp_path / "same", requantize="same", rows=2, max_drift=9.0)
    merged = load_base(tmp_path / "same")
    assert {m.mode for _, m in merged.model.named_modules() if "scales" in m} == {"mxfp4"}
    # means, since another choice of experts changes a token entirely
    own = np.abs(expected - logits(load_base(folder))).mean()
    assert np.abs(logits(merged) - expected).mean() < own / 2


@pytest.mark.parametrize("wrong", [{"group_size": 64}, {"bits": 8}, {"mode": "mxfp4"}])
def test_a_format_is_that_of_the_tensors_whatever_the_config_says(tmp_path, wrong):
    folder = write_fp4(tmp_path / "fp4", "nvfp4")
    expected = logits(load_base(folder))
    set_keys(folder / "config.json", quantization=NVFP4 | wrong)
    base = load_base(folder)
    assert np.array_equal(logits(base), expected)
    assert {(m.mode, m.group_size) for _, m in quantized_modules(base.model)} == {("nvfp4", 16)}


@pytest.mark.parametrize("part", ["gate_up_proj_scales", "down_proj_scales"])
def test_experts_of_gpt_oss_without_scales_are_named(tmp_path, part):
    folder = tmp_path / "gpt-oss"
    write_gpt_oss(folder, tmp_path / "dense")
    change_tensors(folder, lambda tensors: tensors.pop(f"model.layers.0.mlp.experts.{part}"))
    with raises("unreadable", None, "layers.0.mlp.experts", "scales", "missing"):
        load_base(folder)


def test_experts_with_global_scales_are_dequantized_and_not_written():
    dense = SwitchLinear(64, 32, 3, bias=False)
    dense.weight = 0.01 * mx.random.normal(dense.weight.shape, key=mx.random.key(0))
    module = dense.to_quantized(16, 4, "nvfp4", global_scale=True)
    weight = frozen_weight(with_dense_dtype(module, mx.float32))
    error = mx.linalg.norm(weight.dense() - dense.weight)
    assert error < 0.1 * mx.linalg.norm(dense.weight)
    with raises("unsupported", "requantize", "experts", "global"):
        format_after("experts", module, "same")
    weights = {f"experts.{name}": module[name] for name in ("weight", "scales", "global_scale")}
    assert weight_modes_of(weights) == {"experts": "affine"}


def test_an_unknown_mode_is_named(tmp_path):
    folder = write_fp4(tmp_path / "fp4", "nvfp4")
    set_keys(folder / "config.json", quantization=NVFP4 | {"mode": "nvfp5"})
    with raises("unsupported", None, "nvfp5", "nvfp4"):
        load_base(folder)
