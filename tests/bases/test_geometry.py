"""What is probed of a projection, and that every contradiction names module and shapes."""

import importlib

import mlx.nn as nn
import pytest

from mlx_packs.adapters.attach import attach
from mlx_packs.bases.geometry import (
    GeometryError,
    Heads,
    find_groups,
    linears,
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


def packed(out: int, width: int, bits=4, group_size=64, mode="affine", bias=False) -> nn.Module:
    """A quantized linear of zeros with a stored weight of [out, width]."""
    linear = nn.QuantizedLinear(64, 1, bias=bias, bits=bits, group_size=group_size, mode=mode)
    groups = width * 32 // bits // group_size
    linear.weight = mx.zeros((out, width), mx.uint32)
    linear.scales = mx.zeros((out, groups), linear.scales.dtype)
    if mode == "affine":
        linear.biases = mx.zeros((out, groups))
    if bias:
        linear.bias = mx.zeros((out,))
    return linear


@pytest.fixture(scope="module")
def qwen3_4b():
    """One block of Qwen3-4B in 4 bits; the weights stay unevaluated, only shapes matter."""
    model, config = unevaluated("qwen3", **QWEN3_4B)
    nn.quantize(model, group_size=64, bits=4)
    return model, config


def unevaluated(family: str, **changes):
    _, config = model_of(family)
    module = importlib.import_module(f"mlx_lm.models.{family}")
    config |= changes
    return module.Model(module.ModelArgs.from_dict(config)), config


def test_probe_stored_width_320_is_an_input_of_2560(qwen3_4b):
    model, config = qwen3_4b
    q_proj = model.layers[0].self_attn.q_proj
    assert q_proj.weight.shape == (4096, 320) and q_proj.weight.dtype == mx.uint32
    result = probe("model.layers.0.self_attn.q_proj", q_proj, config, grouped=True)
    assert (result.in_features, result.out_features, result.stored_width) == (2560, 4096, 320)
    assert (result.bits, result.group_size, result.mode, result.bias) == (4, 64, "affine", False)
    assert "320 = 2560 x 4 / 32" in result.describe()


def test_find_groups_of_qwen3_4b_has_uneven_members(qwen3_4b):
    groups, faults = find_groups(*qwen3_4b, (), -1)
    assert faults == []

    members = {m.name: (m.in_features, m.out_features) for g in groups for m in g.members}
    assert members == {
        "q_proj": (2560, 4096),
        "k_proj": (2560, 1024),
        "v_proj": (2560, 1024),
        "o_proj": (4096, 2560),
        "gate_proj": (2560, 9728),
        "up_proj": (2560, 9728),
        "down_proj": (9728, 2560),
    }

    assert [len(group.members) for group in groups] == [3, 1, 2, 1]
    assert {group.block for group in groups} == {"model.layers.0.self_attn", "model.layers.0.mlp"}


@pytest.mark.parametrize(
    ("wrong", "projection", "shapes"),
    [
        ({"num_attention_heads": 16}, "q_proj", ("[4096, 2560]", "[2048, 2560]")),
        ({"num_key_value_heads": 32}, "k_proj", ("[1024, 2560]", "[4096, 2560]")),
        ({"head_dim": 80}, "v_proj", ("[1024, 2560]", "[640, 2560]")),
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
        *[("affine", bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)],
        *[("mxfp4", 4, 32), ("nvfp4", 4, 16), ("mxfp8", 8, 32)],
    ],
)
def test_probe_finds_the_input_of_every_packing(mode, bits, group_size):
    linear = nn.QuantizedLinear(384, 40, bias=False, bits=bits, group_size=group_size, mode=mode)
    result = probe("x.proj", linear, {})
    assert (result.in_features, result.out_features, result.stored_width) == (384, 40, 12 * bits)
    assert (result.bits, result.group_size, result.mode) == (bits, group_size, mode)


def test_probe_dense_linear_is_as_wide_as_it_is():
    result = probe("x.proj", nn.Linear(48, 40, bias=False), {})
    assert (result.in_features, result.out_features, result.stored_width) == (48, 40, 48)
    assert result.bits is None and result.describe() == "x.proj: 48 -> 40 (dense [40, 48])"


def with_tensor(name: str, *shape: int) -> nn.Module:
    linear = packed(40, 16, bias=True)  # 128 inputs, 2 groups
    linear[name] = mx.zeros(shape, linear[name].dtype)
    return linear


def without_zero_points() -> nn.Module:
    linear = packed(40, 16)
    linear.biases = None
    return linear


@pytest.mark.parametrize(
    ("linear", "names"),
    [
        (with_tensor("scales", 40, 3), ("group 64", "scales [40, 2]", "[40, 3]")),
        (with_tensor("scales", 20, 2), ("scales [40, 2]", "[20, 2]")),
        (with_tensor("biases", 40, 1), ("biases [40, 2]", "[40, 1]")),
        (with_tensor("bias", 41), ("bias [41]", "40")),
        (with_tensor("weight", 40, 17), ("weight [40, 17]", "4 bits", "group 64", "scales")),
        (with_tensor("weight", 2, 40, 16), ("2 axes", "[2, 40, 16]")),
        (packed(40, 16, bits=3), ("3 bits",)),
        (without_zero_points(), ("biases [40, 2]", "None")),
    ],
)
def test_probe_names_the_tensor_that_contradicts(linear, names):
    with raises("unreadable", None, "model.layers.7.x", *names) as error:
        probe("model.layers.7.x", linear, {})
    assert isinstance(error.value, GeometryError) and error.value.path == "model.layers.7.x"


def test_heads_follow_the_config_and_its_defaults():
    assert Heads.of({"hidden_size": 64, "num_attention_heads": 4}) == Heads(64, None, 4, 4, 16)
    assert Heads.of({"n_embd": 64, "n_head": 2}).head_dim == 32
    nested = {"text_config": QWEN3_4B}
    assert Heads.of(nested) == Heads(2560, 9728, 32, 8, 128)


def test_probe_slices_of_fused_projections():
    gpt2, config = model_of("gpt2")
    (result,) = [probe(p, m, config) for p, m in linears(gpt2) if p.endswith("0.attn.c_attn")]
    assert result.slices == (("q", 64), ("k", 64), ("v", 64))
    phi3 = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    assert probe("a.qkv_proj", nn.Linear(64, 128), phi3).slices == (("q", 64), ("k", 32), ("v", 32))
    mlp = {"intermediate_size": 96}
    assert probe("a.gate_up_proj", nn.Linear(64, 192), mlp).slices == (("gate", 96), ("up", 96))


@pytest.mark.parametrize(
    ("targets", "num_layers", "wanted"),
    [
        (("q_proj",), -1, ["0.self_attn.q_proj", "1.self_attn.q_proj"]),
        (("self_attn.q_proj", "q_proj"), 1, ["1.self_attn.q_proj"]),
        (("model.layers.0.mlp.up_proj",), -1, ["0.mlp.up_proj"]),
        (("model.layers.0.mlp.up_proj",), 1, ["0.mlp.up_proj"]),
        (("1.mlp.up_proj",), -1, ["1.mlp.up_proj"]),
    ],
)
def test_select_targets_by_name_tail_or_path(targets, num_layers, wanted):
    model, _ = model_of("qwen3")
    result = [p for p, _ in select_targets(model, targets, num_layers)]
    assert result == ["model.layers." + w for w in wanted]


def test_select_targets_by_default_are_all_in_the_blocks():
    model, _ = model_of("qwen3")
    result = {p for p, _ in select_targets(model, (), -1)}
    assert len(result) == 14 and "lm_head" not in result
    assert [p for p, _ in select_targets(model, ("lm_head",), -1)] == ["lm_head"]


@pytest.mark.parametrize(
    ("targets", "num_layers", "code", "names"),
    [
        (("q_pro",), -1, "unknown", ("'q_proj'", "down_proj", "v_proj")),
        (("model.norm",), -1, "unsupported", ("model.norm", "RMSNorm")),
        (("oj",), -1, "unknown", ("oj",)),
        ((), 3, "mismatch", ("3", "2 blocks")),
    ],
)
def test_select_targets_names_what_exists(targets, num_layers, code, names):
    model, _ = model_of("qwen3")
    with raises(code, "target_modules" if targets else "num_layers", *names):
        select_targets(model, targets, num_layers)


def pruned_base():
    """A 4-bit base whose second block has a narrower feed-forward than the config promises."""
    base = base_of("qwen3", intermediate_size=128)
    mlp = base.model.layers[1].mlp
    for name in ("gate_proj", "up_proj", "down_proj"):
        mlp[name] = nn.Linear(64, 64, bias=False)
    nn.quantize(base.model, group_size=32, bits=4)
    base.model.freeze()
    return base


FAULTY = [f"model.layers.1.mlp.{n}_proj" for n in ("gate", "up", "down")]


def test_attach_fp16_fallback_dequantizes_faulty_modules_alone():
    base = pruned_base()
    tokens = mx.array([[1, 2, 3, 4]])
    before, originals = base.model(tokens), dict(base.model.named_modules())
    attached = attach(base, fp16_fallback=True)
    assert len(attached.notes) == 3 and len(attached.specs) == 14
    assert all(any(n.startswith(path + ":") for n in attached.notes) for path in FAULTY)
    weights = {p: m.weight.dtype for p, m in base.model.named_modules() if "weight" in m}
    assert {p.removesuffix(".linear") for p, d in weights.items() if d == mx.float16} == set(FAULTY)
    assert mx.allclose(base.model(tokens), before, atol=1e-2)
    attached.detach()
    assert all(m is originals[p] for p, m in base.model.named_modules())


def test_attach_fp16_fallback_says_what_cannot_be_dequantized():
    base = base_of("qwen3")
    nn.quantize(base.model, group_size=32, bits=4)
    q_proj = base.model.layers[0].self_attn.q_proj
    q_proj.scales = q_proj.scales[:, :1]
    with raises("unreadable", None, "layers.0.self_attn.q_proj"):
        attach(base, fp16_fallback=True)
