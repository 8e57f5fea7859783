"""The rule for which modules are packed: one for every way to quantize; and the bytes they take."""

import pytest
from mlx.utils import tree_flatten

from mlx_packs import LoRAConfig, TrainConfig
from mlx_packs.bases.nf4 import NF4Format
from mlx_packs.bases.quantization import QuantizeOptions, format_for
from mlx_packs.bases.weight_formats import MLXFormat, named_format
from mlx_packs.bases.writer import quantize
from mlx_packs.memory.estimate import estimate
from mlx_packs.memory.headers import Headers
from mlx_packs.nn.quantized import quantized_modules
from mlx_packs.packs.base import load_base
from mlx_packs.runtime import mx
from tests.helpers.checkpoints import SIZES_OF, TOKENS, write_dense

MOE = SIZES_OF["qwen3_moe"]


def kinds(base) -> dict[str, tuple]:
    """What each module of a base is packed as."""
    return {
        path: (type(m).__name__, m.mode, m.bits, m.group_size)
        for path, m in base.model.named_modules()
        if "scales" in m or "absmax" in m
    }


@pytest.mark.parametrize(
    ("family", "changes", "keep", "asked"),
    [
        ("qwen3", {"intermediate_size": 33}, (), "affine8"),
        ("qwen3", {"intermediate_size": 72, "tie_word_embeddings": True}, ("v_proj",), "nf4"),
        ("qwen3_moe", MOE, ("embed_tokens",), "nf4"),
        ("qwen3_moe", MOE, ("embed_tokens",), "affine4"),
    ],
)
def test_quantizing_on_loading_is_that_of_packs_quantize(tmp_path, family, changes, keep, asked):
    dense = write_dense(tmp_path / "dense", family=family, **changes)
    report = quantize(dense, tmp_path / "q", QuantizeOptions(named_format(asked), keep))
    written, result = load_base(tmp_path / "q"), load_base(dense, asked, keep=keep)
    assert kinds(written) == kinds(result) and len(kinds(result)) == report["quantized"]
    assert mx.array_equal(written.model(TOKENS), result.model(TOKENS)).item()
    if family == "qwen3_moe":  # routers as their family advises; stacked experts have no NF4
        router, expert = "model.layers.0.mlp.gate", "model.layers.0.mlp.switch_mlp.up_proj"
        assert kinds(result)[router] == ("QuantizedLinear", "affine", 8, 64)
        assert (expert in kinds(result)) == (asked == "affine4")


def test_advice_that_does_not_fit_or_leaves_something_out():
    options, advised = QuantizeOptions(), {"bits": 8}
    assert format_for("gate", (4, 128), options, advice=advised) == MLXFormat(bits=8)
    assert isinstance(format_for("gate", (4, 96), options, advice=advised), str)
    assert isinstance(format_for("gate", (4, 96), options, advice=False), str)
    assert format_for("gate", (4, 96), options) == NF4Format()
    kept = QuantizeOptions(keep=("gate",))
    assert isinstance(format_for("m.gate", (4, 128), kept, advice=advised), str)


@pytest.mark.parametrize(("asked", "count"), [("nf4", 14), ("affine4", 10)])
def test_the_plan_counts_the_modules_that_are_quantized(tmp_path, asked, count):
    # 72 is even but no multiple of 64: NF4 packs such rows, affine does not
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3}
    dense = write_dense(tmp_path / "dense", intermediate_size=72, **heads)
    base, plain = load_base(dense, asked, keep=("v_proj",)), load_base(dense)
    train = TrainConfig(quantize=asked, keep=("v_proj",), matmul_path="quantized")
    plan = estimate(Headers.of(plain), LoRAConfig(rank=2), train)
    assert plan.base == sum(t.nbytes for _, t in tree_flatten(base.model.parameters()))
    assert len(quantized_modules(base.model)) == count
