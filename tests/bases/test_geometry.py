"""What is probed of a projection, and that every contradiction names module and shapes."""

import mlx.nn as nn
import pytest
from mlx_lm.models import qwen3

from mlx_packs.adapters.attach import attach
from mlx_packs.bases.geometry import (
    GeometryError,
    find_groups,
    probe,
    select_targets,
)
from mlx_packs.runtime import mx
from tests.helpers.errors import raises
from tests.helpers.models import base_of, model_of

QWEN3_4B = {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 1,
}


@pytest.fixture(scope="module")
def qwen3_4b():
    """One block of Qwen3-4B in 4 bits; the weights stay unevaluated, only shapes matter."""
    _, config = model_of("qwen3")
    config |= QWEN3_4B
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    nn.quantize(model, group_size=64, bits=4)
    return model, config


def test_probe_stored_width_320_is_an_input_of_2560(qwen3_4b):
    model, config = qwen3_4b
    q_proj = model.layers[0].self_attn.q_proj
    assert q_proj.weight.shape == (4096, 320) and q_proj.weight.dtype == mx.uint32
    result = probe("model.layers.0.self_attn.q_proj", q_proj, config, grouped=True)
    assert (result.in_features, result.out_features, result.stored_width) == (2560, 4096, 320)
    assert (result.bits, result.group_size, result.mode, result.bias) == (4, 64, "affine", False)
    assert "320 = 2560 x 4 / 32" in result.describe()


@pytest.mark.parametrize(
    ("wrong", "projection", "shapes"),
    [
        ({"hidden_size": 320}, "o_proj", ("[2560, 4096]", "[320, 4096]")),
        ({"intermediate_size": 9216}, "down_proj", ("[2560, 9728]", "[2560, 9216]")),
    ],
)
def test_find_groups_names_module_and_both_shapes(qwen3_4b, wrong, projection, shapes):
    model, config = qwen3_4b
    _, faults = find_groups(model, {**config, **wrong}, (projection,), -1)
    (fault,) = faults
    assert fault.path.endswith(projection) and fault.path in str(fault)
    assert all(shape in str(fault) for shape in shapes) and "--train-fp16-fallback" in fault.message


@pytest.mark.parametrize(
    ("mode", "bits", "group_size"),
    [
        *[("affine", bits, 64) for bits in (2, 3, 4, 5, 6, 8)],
        *[("mxfp4", 4, 32), ("nvfp4", 4, 16), ("mxfp8", 8, 32)],
    ],
)
def test_probe_finds_the_input_of_every_packing(mode, bits, group_size):
    linear = nn.QuantizedLinear(384, 40, bias=False, bits=bits, group_size=group_size, mode=mode)
    result = probe("x.proj", linear, {})
    assert (result.in_features, result.out_features, result.stored_width) == (384, 40, 12 * bits)
    assert (result.bits, result.group_size, result.mode) == (bits, group_size, mode)


def with_tensor(name: str, *shape: int) -> nn.Module:
    """A quantized linear of 128 inputs, 2 groups, whose tensor has another shape, or is missing."""
    linear = nn.QuantizedLinear(128, 40, bits=4, group_size=64)
    setattr(linear, name, mx.zeros(shape, linear[name].dtype) if shape else None)
    return linear


@pytest.mark.parametrize(
    ("linear", "names"),
    [
        (with_tensor("scales", 40, 3), ("group 64", "scales [40, 2]", "[40, 3]")),
        (with_tensor("bias", 41), ("bias [41]", "40")),
        (with_tensor("weight", 40, 17), ("weight [40, 17]", "4 bits", "group 64", "scales")),
        (with_tensor("weight", 2, 40, 16), ("2 axes", "[2, 40, 16]")),
        (with_tensor("biases"), ("biases [40, 2]", "None")),
    ],
)
def test_probe_names_the_tensor_that_contradicts(linear, names):
    with raises("unreadable", None, "model.layers.7.x", *names) as error:
        probe("model.layers.7.x", linear, {})
    assert isinstance(error.value, GeometryError) and error.value.path == "model.layers.7.x"


@pytest.mark.parametrize(
    ("targets", "num_layers", "wanted"),
    [
        (("q_proj",), -1, ["0.self_attn.q_proj", "1.self_attn.q_proj"]),
        (("self_attn.q_proj", "q_proj"), 1, ["1.self_attn.q_proj"]),
        (("model.layers.0.mlp.up_proj",), 1, ["0.mlp.up_proj"]),
        (("1.mlp.up_proj",), -1, ["1.mlp.up_proj"]),
    ],
)
def test_select_targets_by_name_tail_or_path(targets, num_layers, wanted):
    model, _ = model_of("qwen3")
    result = [p for p, _ in select_targets(model, targets, num_layers)]
    assert result == ["model.layers." + w for w in wanted]


def test_attach_fp16_fallback_says_what_cannot_be_dequantized():
    base = base_of("qwen3")
    nn.quantize(base.model, group_size=32, bits=4)
    q_proj = base.model.layers[0].self_attn.q_proj
    q_proj.scales = q_proj.scales[:, :1]
    with raises("unreadable", None, "layers.0.self_attn.q_proj"):
        attach(base, fp16_fallback=True)
