"""Which modules are packed, whatever quantizes them; the bytes of each format, and what comes back."""

import pytest
from mlx.utils import tree_flatten

from mlx_packs import LoRAConfig, TrainConfig
from mlx_packs.bases.nf4 import NF4Format
from mlx_packs.bases.quantization import QuantizeOptions, format_for
from mlx_packs.bases.weight_formats import (
    MLXFormat,
    WeightFormat,
    format_name,
    named_format,
    specified_format,
)
from mlx_packs.bases.writer import quantize
from mlx_packs.config.choices import WEIGHT_FORMATS
from mlx_packs.memory.estimate import estimate
from mlx_packs.memory.headers import Headers
from mlx_packs.nn.quantized import quantized_modules
from mlx_packs.packs.base import load_base
from mlx_packs.runtime import mx
from tests.helpers.checkpoints import SIZES_OF, TOKENS, write_dense
from tests.helpers.errors import raises

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


NATIVE = [MLXFormat("affine", bits, 64) for bits in (2, 3, 4, 5, 6, 8)]
NATIVE += [MLXFormat("affine", 4, 32), MLXFormat("affine", 4, 128)]
NF4 = [NF4Format(32, True), NF4Format(64, True), NF4Format(64, False), NF4Format(256, False)]
FP4 = [named_format("mxfp4"), named_format("nvfp4")]
MXFP8 = MLXFormat("mxfp8", 8, 32)  # not registered: what another format needs is its settings
ALL = [*NATIVE, *NF4, *FP4, MXFP8]


def label(weight_format: WeightFormat) -> str:
    return "-".join(map(str, weight_format.to_config().values()))


@pytest.mark.parametrize("shape", [(37, 72), (5, 90), (1, 6), (520, 514), (64, 256), (3, 4, 64)])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32])
def test_nbytes_is_what_the_outline_takes(shape, dtype):
    w = mx.zeros(shape, dtype)
    kind = "linear" if len(shape) == 2 else "other"
    fitting = [f for f in ALL if f.fits(shape[-1]) and f.holds(kind)]
    for weight_format in fitting:
        outline = weight_format.outline("p.weight", w)
        assert weight_format.nbytes(shape, dtype.size) == sum(t.nbytes for t in outline.values())
    assert fitting


@pytest.mark.parametrize("weight_format", ALL, ids=label)
def test_dequantize_of_quantize_is_rounded_and_near_the_weight(weight_format):
    w = mx.random.normal((12, 256))
    tensors, outline = (f("p.weight", w) for f in (weight_format.quantize, weight_format.outline))
    assert {n: (t.shape, t.dtype) for n, t in tensors.items()} == {
        n: (t.shape, t.dtype) for n, t in outline.items()
    }
    back = weight_format.dequantize(tensors, mx.float32)
    assert mx.array_equal(back, weight_format.rounded(w)).item()
    step = 8 / 2**weight_format.bits  # of weights that span about 8 standard deviations
    if weight_format not in (*FP4, MXFP8):  # whose steps grow with the weights
        assert mx.abs(back - w).max().item() < step
    share = 0.06 if weight_format == MXFP8 else step / 3
    assert mx.linalg.norm(back - w).item() < share * mx.linalg.norm(w).item()


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_a_name_and_its_config_mean_the_same_format(name):
    assert format_name(named_format(name).to_config()) == name


def test_other_quantizations_have_no_name():
    assert format_name(None) == format_name({}) == "none"
    assert format_name(MLXFormat(bits=3).to_config()) == "none"
    assert format_name(MLXFormat(group_size=32).to_config()) == "none"
    assert format_name({"bits": 4, "group_size": 64}) == "affine4"  # as mlx-lm once wrote it


def test_settings_of_a_mode_are_those_of_its_format():
    assert specified_format("affine", bits=8, group_size=None) == MLXFormat(bits=8)
    assert specified_format("nf4", group_size=32, double_quant=False) == NF4Format(32, False)
    assert named_format("nf4", double_quant=False) == NF4Format(double_quant=False)
    assert specified_format("mxfp4", bits=None) == named_format("mxfp4")
    assert named_format("affine4", double_quant=False) == MLXFormat()
    with raises("conflict", "group_size", "nvfp4"):
        specified_format("nvfp4", group_size=16)
