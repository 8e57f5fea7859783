"""The rule for which modules are packed: one for every way to quantize; and the bytes they take."""

import pytest
from mlx.utils import tree_flatten

from mlx_packs import LoRAConfig, TrainConfig
from mlx_packs.bases.nf4 import NF4Format
from mlx_packs.bases.quantization import QuantizeOptions, format_for, formats_for
from mlx_packs.bases.weight_formats import MLXFormat, named_format
from mlx_packs.bases.writer import quantize
from mlx_packs.config.choices import WEIGHT_FORMATS
from mlx_packs.memory.estimate import estimate
from mlx_packs.memory.headers import Headers
from mlx_packs.nn.quantized import quantized_modules
from mlx_packs.packs.base import load_base
from mlx_packs.runtime import mx
from tests.helpers.checkpoints import TOKENS, write_dense
from tests.helpers.errors import raises
from tests.helpers.models import model_of

MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}


def kinds(base) -> dict[str, tuple]:
    """What each module of a base is packed as."""
    return {
        path: (type(m).__name__, m.mode, m.bits, m.group_size)
        for path, m in base.model.named_modules()
        if "scales" in m or "absmax" in m
    }


@pytest.mark.parametrize("asked", WEIGHT_FORMATS)
@pytest.mark.parametrize(
    "family, changes, keep",
    [
        ("qwen3", {"intermediate_size": 33}, ()),
        ("qwen3", {"intermediate_size": 72, "tie_word_embeddings": True}, ("lm_head", "v_proj")),
        ("qwen3_moe", MOE, ("embed_tokens",)),
    ],
)
def test_quantizing_on_loading_is_that_of_packs_quantize(tmp_path, family, changes, keep, asked):
    dense = write_dense(tmp_path / "dense", family=family, **changes)
    report = quantize(dense, tmp_path / "q", QuantizeOptions(named_format(asked), keep))
    written, result = load_base(tmp_path / "q"), load_base(dense, asked, keep=keep)
    assert kinds(written) == kinds(result) and len(kinds(result)) == report["quantized"]
    assert mx.array_equal(written.model(TOKENS), result.model(TOKENS)).item()


def test_routers_are_quantized_as_their_family_advises(tmp_path):
    dense = write_dense(tmp_path / "dense", family="qwen3_moe", **MOE)
    result = kinds(load_base(dense, "nf4"))
    router, expert = "model.layers.0.mlp.gate", "model.layers.0.mlp.switch_mlp.up_proj"
    assert result[router] == ("QuantizedLinear", "affine", 8, 64)
    assert expert not in result  # stacked experts have no NF4
    assert result["model.layers.0.self_attn.q_proj"][1] == "nf4"
    result = kinds(load_base(dense, "affine4"))
    assert result[router][2:] == (8, 64) and result[expert][2:] == (4, 64)


def test_advice_that_does_not_fit_or_leaves_something_out():
    options, advised = QuantizeOptions(), {"bits": 8}
    assert format_for("gate", (4, 128), options, advice=advised) == MLXFormat(bits=8)
    assert isinstance(format_for("gate", (4, 96), options, advice=advised), str)
    assert isinstance(format_for("gate", (4, 96), options, advice=False), str)
    assert format_for("gate", (4, 96), options) == NF4Format()
    assert isinstance(
        format_for("m.gate", (4, 128), QuantizeOptions(keep=("gate",)), advice=advised), str
    )


@pytest.mark.parametrize("asked", ["nf4", "affine4"])
def test_the_plan_counts_the_modules_that_are_quantized(tmp_path, asked):
    # 72 is even but no multiple of 64: NF4 packs such rows, affine does not
    dense = write_dense(
        tmp_path / "dense", intermediate_size=72, num_attention_heads=3, num_key_value_heads=3
    )
    keep = ("v_proj",)
    base, plain = load_base(dense, asked, keep=keep), load_base(dense)
    train = TrainConfig(quantize=asked, keep=keep, matmul_path="quantized")
    lora = LoRAConfig(rank=2)
    plan = estimate(Headers.of(plain), lora, train)
    assert plan.base == sum(t.nbytes for _, t in tree_flatten(base.model.parameters()))
    assert len(quantized_modules(base.model)) == (14 if asked == "nf4" else 10)


def test_the_rule_needs_no_model():
    model, _ = model_of("qwen3", tie_word_embeddings=True)
    options = QuantizeOptions(keep=("up_proj",))
    packed, dense = formats_for(model, options)
    assert len(packed) == 2 * 6 + 1 and len(dense) == 2
    for path, module in model.named_modules():
        if path in packed or path in dense:
            assert format_for(path, module.weight.shape, options) == (
                packed.get(path) or dense[path]
            )


def test_an_unknown_format_is_named_with_the_nearest():
    with raises("unknown", "quantize", "nf5", "nf4"):
        load_base("tiny", "nf5")
