"""Bases in mxfp4 and nvfp4: what they compute is what their dequantized weights compute."""

import numpy as np
import pytest
from mlx_lm.utils import load_model

from mlx_packs import load_base
from mlx_packs.bases.mapped_embedding import map_embedding
from mlx_packs.config.choices import MATMUL_PATHS
from mlx_packs.convert.merge import merge_pack
from mlx_packs.nn.frozen_weight import frozen_weight
from mlx_packs.nn.quantized import dense_module, quantized_modules
from mlx_packs.runtime import mx
from tests.helpers.checkpoints import TOKENS, attached_logits, layout, logits
from tests.helpers.fp4 import GROUP_SIZES, dequantized, write_dequantized, write_fp4
from tests.helpers.packs import random_pack
from tests.helpers.steps import largest_difference, lora_loss_and_gradients


@pytest.mark.parametrize("mode", GROUP_SIZES)
def test_loss_and_gradient_are_those_of_the_dequantized_weights(tmp_path, mode):
    folder = write_fp4(tmp_path / "fp4", mode)
    loss, gradient = lora_loss_and_gradients(write_dequantized(tmp_path / "dense", folder), "dense")
    largest = max(mx.abs(g).max().item() for g in gradient.values())
    for path in MATMUL_PATHS:
        result, gradient_of_path = lora_loss_and_gradients(folder, path)
        assert abs(result - loss) < 1e-5 * loss, path
        assert largest_difference(gradient_of_path, gradient) < 1e-5 * largest, path


@pytest.mark.parametrize("mode", GROUP_SIZES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
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


def test_rows_of_a_mapped_embedding_are_those_of_the_loaded_one(tmp_path):
    folder = write_fp4(tmp_path / "fp4", "mxfp4")
    embedding = load_base(folder).model.model.embed_tokens
    tokens = np.array([[3, 95, 0], [17, 3, 2000]], np.int32)
    rows = map_embedding(folder, "model.embed_tokens.weight", embedding)(tokens)
    assert rows.dtype == mx.float32 and mx.array_equal(rows, embedding(mx.array(tokens)))


@pytest.mark.parametrize("mode", GROUP_SIZES)
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


@pytest.mark.parametrize("mode", GROUP_SIZES)
def test_quantizing_dequantized_weights_again_changes_nothing(tmp_path, mode, run):
    dense = write_dequantized(tmp_path / "dense", write_fp4(tmp_path / "fp4", mode))
    assert run("quantize", "--model", dense, "--mode", mode, "--out", tmp_path / "again")[0] == 0

    again = load_base(tmp_path / "again")
    assert again.quantization == load_base(tmp_path / "fp4").quantization
    assert np.array_equal(logits(again), logits(load_base(tmp_path / "fp4")))
    on_loading = load_base(dense, quantize=mode)
    assert np.array_equal(logits(on_loading), logits(again))
