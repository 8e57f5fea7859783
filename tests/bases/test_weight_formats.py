"""Every weight format: what it writes, how large that is, and what comes back from it."""

import pytest

from mlx_packs.bases.nf4 import NF4Format
from mlx_packs.bases.quantization import QuantizeOptions, quantize_weights
from mlx_packs.bases.weight_formats import (
    MLXFormat,
    WeightFormat,
    format_name,
    format_of,
    named_format,
    specified_format,
)
from mlx_packs.config.choices import WEIGHT_FORMATS
from mlx_packs.runtime import mx
from tests.helpers.errors import raises
from tests.helpers.models import model_of

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
def test_outline_has_the_names_shapes_and_dtypes_of_quantize(weight_format):
    w = mx.random.normal((12, 256)).astype(mx.bfloat16)
    tensors, outline = (f("p.weight", w) for f in (weight_format.quantize, weight_format.outline))
    assert {n: (t.shape, t.dtype) for n, t in tensors.items()} == {
        n: (t.shape, t.dtype) for n, t in outline.items()
    }


@pytest.mark.parametrize("weight_format", ALL, ids=label)
def test_dequantize_of_quantize_is_rounded_and_near_the_weight(weight_format):
    w = mx.random.normal((12, 256))
    back = weight_format.dequantize(weight_format.quantize("p.weight", w), mx.float32)
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
    with raises("conflict", "bits", "nf4"):
        specified_format("nf4", bits=3)
    with raises("conflict", "group_size", "nvfp4"):
        specified_format("nvfp4", group_size=16)
    with raises("conflict", "double_quant", "affine"):
        specified_format("affine", double_quant=False)


@pytest.mark.parametrize("weight_format", [MLXFormat(bits=8), *FP4, MXFP8], ids=label)
def test_modules_quantized_while_loading_have_the_format(weight_format):
    model, _ = model_of("llama", hidden_size=64, intermediate_size=128)
    weights = {"model.layers.0.mlp.up_proj.weight": mx.random.normal((128, 64))}
    module = model.layers[0].mlp.up_proj
    assert format_of(module) is None
    quantized = quantize_weights(model, dict(weights), QuantizeOptions(weight_format))
    module = model.layers[0].mlp.up_proj
    assert format_of(module) == weight_format
    module.update({name.rpartition(".")[2]: tensor for name, tensor in quantized.items()})
    (w,) = weights.values()
    expected = mx.ones((1, 64)) @ weight_format.rounded(w).T
    assert mx.allclose(module(mx.ones((1, 64))), expected, atol=1e-3).item()
