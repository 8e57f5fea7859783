"""Checkpoints of compressed-tensors in mxfp4 and nvfp4: the bits of the specification, or an error."""

import json

import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_packs import LoRAConfig, TrainConfig, load_base
from mlx_packs.bases.nvfp4 import GlobalNVFP4Format
from mlx_packs.bases.weight_formats import NVFP4Format, format_of
from mlx_packs.config.choices import MATMUL_PATHS
from mlx_packs.memory.estimate import estimate
from mlx_packs.memory.read import read_headers
from mlx_packs.nn.frozen_weight import frozen_weight
from mlx_packs.nn.lora import is_switch_linear
from mlx_packs.nn.quantized import apply_matmul_path, count_weights, quantized_modules
from mlx_packs.reading import read_header
from mlx_packs.runtime import mx
from tests.helpers.checkpoints import SIZES_OF, attached_logits, logits, merged, write_files
from tests.helpers.errors import raises
from tests.helpers.fp4 import GROUP_SIZES, dequantized, scheme_of, write_compressed, write_raw
from tests.helpers.models import model_of
from tests.helpers.packs import random_pack
from tests.helpers.steps import largest_difference, lora_loss_and_gradients
from tests.helpers.variants import slow_except

UP = "model.layers.0.mlp.up_proj"


def write_dense_of(folder, source):
    """The same weights, dequantized by NumPy."""
    config = json.loads((source / "config.json").read_text())
    mode = config.pop("quantization_config")["format"].partition("-")[0]
    tensors = mx.load(str(source / "model.safetensors"))

    dense = {}
    for name, tensor in tensors.items():
        path, _, part = name.rpartition(".")
        if part == "weight_packed":
            scales = np.array(tensors[f"{path}.weight_scale"])
            factor = tensors.get(f"{path}.weight_global_scale")
            factor = None if factor is None else factor.item()
            weight = dequantized(np.array(tensor), scales, mode, factor)
            dense[f"{path}.weight"] = mx.array(weight)  # mlx-lm stacks experts
        elif "scale" not in part:
            dense[name] = tensor
    return write_files(folder, dense, config)


@pytest.mark.parametrize("mode", GROUP_SIZES)
def test_weights_are_bit_identical_to_the_specification(tmp_path, mode):
    folder = write_compressed(tmp_path / "base", mode)
    expected = dict(
        tree_flatten(load_base(write_dense_of(tmp_path / "d", folder)).model.parameters())
    )
    base = load_base(folder)
    modules = quantized_modules(base.model)
    assert len(modules) == 14 and base.quantization["mode"] == mode

    for path, module in modules:
        weight = frozen_weight(module)
        weight.check()
        dense = expected[f"{path}.weight"]
        assert mx.array_equal(weight.dense(), dense), path
        assert mx.array_equal(weight.rows(slice(3, 9)), dense[3:9])
        assert mx.array_equal(weight.stored(mx.bfloat16), dense.astype(mx.bfloat16))
        assert format_of(module).bits == 4
    assert count_weights(base.model) == count_weights(load_base(tmp_path / "d").model)


@pytest.mark.parametrize("mode", GROUP_SIZES)
def test_loss_and_gradient_are_those_of_the_dense_weights(tmp_path, mode):
    folder = write_compressed(tmp_path / "base", mode)
    loss, gradient = lora_loss_and_gradients(write_dense_of(tmp_path / "dense", folder), "dense")
    largest = max(mx.abs(g).max().item() for g in gradient.values())
    for path in MATMUL_PATHS:
        result, gradient_of_path = lora_loss_and_gradients(folder, path)
        assert abs(result - loss) < 1e-5 * loss, path
        assert largest_difference(gradient_of_path, gradient) < 1e-5 * largest, path


EXPERTS = ("q_proj", "gate_proj", "up_proj", "down_proj")


MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64}


def write_mixture(folder, mode):
    """Experts one by one, each with scales and a global scale of its own; the router is dense."""
    return write_compressed(folder, mode, "qwen3_moe", **SIZES_OF["qwen3_moe"])


@pytest.mark.parametrize("mode", GROUP_SIZES)
def test_experts_stored_one_by_one_are_those_of_the_specification(tmp_path, mode):
    folder = write_mixture(tmp_path / "base", mode)
    dense = load_base(write_dense_of(tmp_path / "dense", folder))
    base = load_base(folder)
    experts = [(path, m) for path, m in base.model.named_modules() if is_switch_linear(m)]
    assert len(experts) == 6

    weights = dict(tree_flatten(dense.model.parameters()))
    for path, module in experts:
        weight = frozen_weight(module)
        weight.check()
        assert format_of(module).mode in (mode, "nvfp4-global")
        assert mx.array_equal(weight.dense(), weights[f"{path}.weight"]), path
    assert count_weights(base.model) == count_weights(dense.model)
    assert np.abs(logits(base) - logits(dense)).max() < 1e-4


@pytest.mark.parametrize("mode", slow_except(GROUP_SIZES, "mxfp4"))
def test_experts_train_and_merge(tmp_path, mode):
    folder = write_mixture(tmp_path / "base", mode)
    dense = write_dense_of(tmp_path / "dense", folder)
    loss, gradient = lora_loss_and_gradients(dense, "dense", EXPERTS)
    largest = max(mx.abs(g).max().item() for g in gradient.values())
    for path in MATMUL_PATHS:
        result, gradient_of_path = lora_loss_and_gradients(folder, path, EXPERTS)
        assert abs(result - loss) < 1e-5 * loss, path
        assert largest_difference(gradient_of_path, gradient) < 1e-5 * largest, path

    pack = random_pack(load_base(folder), targets=EXPERTS).save(tmp_path / "pack")
    expected = attached_logits(pack, folder)
    merged(pack, folder, tmp_path / "merged", dtype="float32")
    assert np.abs(logits(load_base(tmp_path / "merged")) - expected).max() < 1e-4

    merged(pack, folder, tmp_path / "fp4", requantize=mode)
    written = load_base(tmp_path / "fp4")
    stacks = [m for m in written.model.modules() if is_switch_linear(m)]
    assert {format_of(m).mode for m in stacks} == {mode}


@pytest.mark.parametrize(("size", "without"), [(1.0, 0.096), (0.02, 0.104), (0.01, 0.126)])
def test_small_weights_need_the_global_scale(size, without):
    w = size * mx.random.normal((256, 1024), key=mx.random.key(0))
    for weight_format, error in ((NVFP4Format(), without), (GlobalNVFP4Format(), 0.0955)):
        measured = mx.linalg.norm(weight_format.rounded(w) - w) / mx.linalg.norm(w)
        assert measured.item() == pytest.approx(error, rel=0.02)


@pytest.mark.parametrize("path", MATMUL_PATHS)
def test_products_with_a_global_scale_stay_in_the_range_of_float16(tmp_path, path):
    base = load_base(write_compressed(tmp_path / "base", "nvfp4"), compute_dtype="float16")
    module = base.model.layers[0].mlp.up_proj
    x = 40 * mx.ones((3, module.weight.shape[1] * 8), mx.float16)
    expected = x.astype(mx.float32) @ frozen_weight(module).stored(mx.float32).T
    apply_matmul_path(base.model, path)
    y = base.model.layers[0].mlp.up_proj(x)
    assert y.dtype in (mx.float16, mx.float32) and mx.allclose(y, expected, rtol=0.02, atol=0.1)


@pytest.mark.parametrize("mode", GROUP_SIZES)
def test_a_plan_counts_its_tensors(tmp_path, mode):
    folder = write_compressed(tmp_path / "base", mode)
    base = load_base(folder)
    nbytes = sum(array.nbytes for _, array in tree_flatten(base.model.parameters()))
    train = TrainConfig(matmul_path="transient", compute_dtype="float32")
    assert estimate(read_headers(folder), LoRAConfig(), train).base == nbytes


@pytest.mark.parametrize("mode", slow_except(GROUP_SIZES, "nvfp4"))
def test_merges_are_dense_or_in_formats_of_mlx(tmp_path, mode):
    folder = write_compressed(tmp_path / "base", mode)
    pack = random_pack(load_base(folder)).save(tmp_path / "pack")
    expected = attached_logits(pack, folder)
    merged(pack, folder, tmp_path / "dense", dtype="float32")
    assert np.abs(logits(load_base(tmp_path / "dense")) - expected).max() < 1e-4

    merged(pack, folder, tmp_path / "fp4", requantize=mode)
    written = load_base(tmp_path / "fp4")
    assert {format_of(m).mode for _, m in quantized_modules(written.model)} == {mode}
    assert written.quantization["mode"] == mode

    merged(pack, folder, tmp_path / "same", requantize="same")
    if mode == "mxfp4":
        assert np.array_equal(logits(load_base(tmp_path / "same")), logits(written))


def merged_as_stored(tmp_path, folder, targets):
    """Merge a small random pack with --requantize same; return the tensors before and after."""
    pack = random_pack(load_base(folder), size=0.3, targets=targets).save(tmp_path / "pack")
    expected = attached_logits(pack, folder)
    report = merged(pack, folder, tmp_path / "same", requantize="same")

    assert report["kl_mean"] > 0
    own = np.abs(expected - logits(load_base(folder))).mean()
    assert np.abs(logits(load_base(tmp_path / "same")) - expected).mean() < own / 2
    assert json.loads((tmp_path / "same" / "config.json").read_text()) == json.loads(
        (folder / "config.json").read_text()
    )
    return tuple(read_header(f / "model.safetensors")[0] for f in (folder, tmp_path / "same"))


def test_a_merge_with_global_scales_is_stored_as_its_base(tmp_path):
    folder = write_mixture(tmp_path / "base", "nvfp4")
    before, after = merged_as_stored(tmp_path, folder, EXPERTS)
    layout = {name: (tensor["dtype"], tensor["shape"]) for name, tensor in before.items()}
    assert {name: (tensor["dtype"], tensor["shape"]) for name, tensor in after.items()} == layout

    old = mx.load(str(folder / "model.safetensors"))
    new = mx.load(str(tmp_path / "same" / "model.safetensors"))
    changed = {name for name in old if not mx.array_equal(old[name], new[name])}
    assert {name.split(".")[-2] for name in changed} == set(EXPERTS)
    assert not any(name.endswith("input_global_scale") for name in changed)


def test_a_merge_keeps_the_names_of_experts_of_mixtral(tmp_path):
    folder = write_compressed(tmp_path / "base", "nvfp4", "mixtral", **MIXTRAL)
    names = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    tensors = {}
    for name, tensor in raw(folder).items():
        leaf = name.split(".")[-2]
        tensors[name.replace(leaf, names.get(leaf, leaf))] = tensor
    write_raw(folder / "model.safetensors", tensors)

    before, after = merged_as_stored(tmp_path, folder, EXPERTS)
    assert after.keys() == before.keys()


def test_a_global_scale_is_kept_while_the_weight_fits():
    w = mx.random.normal((2, 64, 64), key=mx.random.key(0))
    scales = (2688 / mx.abs(w).max(axis=(1, 2))).tolist()
    for factor, kept in ((0.5, True), (1.03, True), (1.1, False)):
        own = GlobalNVFP4Format(tuple(scales))
        tensors = own.quantize("experts.weight", factor * w)
        assert (tensors["experts.global_scale"].tolist() == scales) is kept
        error = mx.linalg.norm(own.dequantize(tensors, mx.float32) - factor * w)
        assert error < 0.1 * factor * mx.linalg.norm(w)


def edited(**changes):
    def edit(scheme):
        scheme.update(changes)

    return edit


def of_group(part, **changes):
    def edit(scheme):
        group = scheme["config_groups"]["group_0"]
        group[part] = {**(group.get(part) or {}), **changes}

    return edit


SCHEMES = {
    "fp8": (edited(format="float-quantized"), "float-quantized"),
    "int8": (edited(format="int-quantized"), "int-quantized"),
    "mixed": (edited(format="mixed-precision"), "mixed-precision"),
    "no format": (edited(format=None), "nvfp4-pack-quantized"),
    "groups": (of_group("weights", group_size=32), "group_size"),
    "bits": (of_group("weights", num_bits=8), "num_bits"),
    "zero points": (of_group("weights", symmetric=False), "zero points"),
    "fixed scales": (of_group("input_activations", dynamic=False), "activations"),
    "int8 activations": (of_group("input_activations", type="int"), "activations"),
    "outputs": (of_group("output_activations", num_bits=8), "output_activations"),
    "rotations": (edited(transform_config={"config_groups": {}}), "transform_config"),
    "sparse": (edited(sparsity_config={"format": "sparse-24-bitmask"}), "sparse-24"),
}
TEXTS = {
    "a list": (edited(config_groups=[]), "config_groups"),
    "a number": (edited(ignore=[3]), "ignore"),
    "a text": (edited(config_groups={"group_0": {"weights": "W4"}}), "weights"),
}


@pytest.fixture(scope="module")
def nvfp4(tmp_path_factory):
    return write_compressed(tmp_path_factory.mktemp("nvfp4") / "base", "nvfp4")


def with_scheme(folder, edit):
    config = json.loads((folder / "config.json").read_text())
    scheme = scheme_of("nvfp4")
    edit(scheme)
    config["quantization_config"] = scheme
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", SCHEMES)
def test_other_schemes_are_named(nvfp4, name):
    edit, shown = SCHEMES[name]
    with raises("unsupported", None, shown, "compressed-tensors", "--quantize"):
        load_base(with_scheme(nvfp4, edit))


@pytest.mark.parametrize("name", TEXTS)
def test_values_of_other_types_are_named(nvfp4, name):
    edit, shown = TEXTS[name]
    with raises("unreadable", None, shown, "config.json"):
        load_base(with_scheme(nvfp4, edit))


def test_activations_that_stay_dense_are_said_once(nvfp4, caplog):
    load_base(with_scheme(nvfp4, edited()))
    load_base(nvfp4)
    assert caplog.text.count("quantized activations") <= 1


def raw(folder):
    dtypes = {"weight_scale": "F8_E4M3"}
    tensors = mx.load(str(folder / "model.safetensors"))
    names = {mx.uint8: "U8", mx.float32: "F32"}
    return {
        name: (dtypes.get(name.rpartition(".")[2], names[t.dtype]), np.array(t))
        for name, t in tensors.items()
    }


def without(part):
    return lambda tensors: tensors.pop(f"{UP}.{part}")


def replaced(part, value):
    def replace(tensors):
        tensors[f"{UP}.{part}"] = (tensors[f"{UP}.{part}"][0], value(tensors[f"{UP}.{part}"][1]))

    return replace


TENSORS = {
    "no scale": (without("weight_scale"), "weight_scale"),
    "no codes": (without("weight_packed"), "weight_packed"),
    "no global scale": (without("weight_global_scale"), "weight_global_scale"),
    "fewer scales": (replaced("weight_scale", lambda a: a[:, :-1]), "weight_scale"),
    "fewer rows": (replaced("weight_packed", lambda a: a[:-1]), "weight_scale"),
    "two global scales": (replaced("weight_global_scale", lambda a: np.tile(a, 2)), "global_scale"),
    "NaN": (replaced("weight_global_scale", lambda a: a * np.float32("nan")), "global_scale"),
    "zero": (replaced("weight_global_scale", lambda a: a * 0), "global_scale"),
    "NaN of scales": (replaced("weight_scale", lambda a: a | 0x7F), "NaN"),
    "another width": (
        lambda tensors: [
            replaced("weight_packed", lambda a: a[:, :16])(tensors),
            replaced("weight_scale", lambda a: a[:, :2])(tensors),
        ],
        "up_proj",
    ),
}


def of_expert(part, expert=3):
    return f"model.layers.1.mlp.experts.{expert}.down_proj.{part}"


def dense_expert(tensors):
    for part in ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"):
        del tensors[of_expert(part)]
    tensors[of_expert("weight")] = ("F32", np.zeros((64, 64), np.float32))


def narrow_expert(tensors):
    for part in ("weight_packed", "weight_scale"):
        dtype, array = tensors[of_expert(part)]
        tensors[of_expert(part)] = (dtype, array[:32])


MIXTURES = {
    "no codes": (lambda tensors: tensors.pop(of_expert("weight_packed", 1)), "experts.1.down"),
    "no global scale": (
        lambda tensors: tensors.pop(of_expert("weight_global_scale")),
        "weight_global_scale is missing",
    ),
    "a dense expert": (dense_expert, "must all be quantized"),
    "fewer rows": (narrow_expert, "different shapes"),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_damaged_experts_are_named(tmp_path, name):
    damage, shown = MIXTURES[name]
    folder = write_mixture(tmp_path / "base", "nvfp4")
    tensors = raw(folder)
    damage(tensors)
    write_raw(folder / "model.safetensors", tensors)
    with raises("unreadable", None, shown):
        load_base(folder)


@pytest.mark.parametrize("entry", [UP, "re:.*up_proj$", r"re:^model\.layers\.0.*"])
def test_ignored_modules_that_are_quantized_are_named(nvfp4, entry):
    with raises("unreadable", None, "model.layers.0.", "weight_packed", "ignore"):
        load_base(with_scheme(nvfp4, edited(ignore=["lm_head", entry])))


@pytest.mark.parametrize("entry", ["re:(.*)*up_proj", "re:.*gate$", "Linear", "mlp.up_proj"])
def test_other_entries_of_the_list_of_ignored_modules_are_accepted(nvfp4, entry):
    load_base(with_scheme(nvfp4, edited(ignore=["lm_head", entry])))


@pytest.mark.parametrize("name", TENSORS)
def test_damaged_tensors_are_named(tmp_path, name):
    damage, shown = TENSORS[name]
    folder = write_compressed(tmp_path / "base", "nvfp4")
    tensors = raw(folder)
    damage(tensors)
    write_raw(folder / "model.safetensors", tensors)
    with raises("unreadable", None, shown):
        load_base(folder)


def test_a_file_cut_short_and_one_without_packed_weights_are_named(tmp_path):
    folder = write_compressed(tmp_path / "base", "mxfp4")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with raises("unreadable", None, "model.safetensors"):
        load_base(folder)

    model, config = model_of("qwen3", vocab_size=4096)
    config["quantization_config"] = scheme_of("mxfp4")
    dense = write_files(tmp_path / "dense", dict(tree_flatten(model.parameters())), config)
    with raises("unreadable", None, "weight_packed"):
        load_base(dense)


def by_the_package(weight, mode):
    """What the package stores of a weight, as bytes and floats by part, and dequantizes it to."""
    import torch
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    scheme = QuantizationScheme(**scheme_of(mode)["config_groups"]["group_0"])
    compressor = BaseCompressor.get_value_from_registry(f"{mode}-pack-quantized")
    groups = weight.reshape(len(weight), -1, GROUP_SIZES[mode])
    state = {"weight": weight}
    if mode == "nvfp4":
        state["weight_global_scale"] = generate_gparam(weight.min(), weight.max())
    state["weight_scale"], _ = calculate_qparams(
        groups.amin(-1), groups.amax(-1), scheme.weights, state.get("weight_global_scale")
    )

    stored = compressor.compress(state, scheme)
    dense = compressor.decompress(stored, scheme)["weight"]
    assert dense.dtype == torch.bfloat16
    parts = {
        part: tensor if part.endswith("global_scale") else tensor.view(torch.uint8)
        for part, tensor in stored.items()
        if part.startswith("weight_")
    }
    return {part: tensor.numpy() for part, tensor in parts.items()}, dense.float().numpy()


def with_parts(folder, path, parts):
    tensors = raw(folder)
    for part, array in parts.items():
        name = f"{path}.{part}"
        tensors[name] = (tensors[name][0], array)
    write_raw(folder / "model.safetensors", tensors)


@pytest.mark.interop
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("mode", GROUP_SIZES)
def test_weights_of_the_package_are_bit_identical(tmp_path, mode):
    pytest.importorskip("compressed_tensors")
    import torch

    folder = write_compressed(tmp_path / "base", mode)
    weight = 0.02 * torch.randn(96, 64, generator=torch.Generator().manual_seed(0))
    parts, theirs = by_the_package(weight, mode)
    with_parts(folder, UP, parts)

    ours = frozen_weight(load_base(folder).model.layers[0].mlp.up_proj).stored(mx.bfloat16)
    assert np.array_equal(np.array(ours.astype(mx.float32)), theirs)


@pytest.mark.interop
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("mode", GROUP_SIZES)
def test_experts_of_the_package_are_bit_identical(tmp_path, mode):
    pytest.importorskip("compressed_tensors")
    import torch

    folder = write_mixture(tmp_path / "base", mode)
    random = torch.Generator().manual_seed(0)
    theirs = []
    for expert, size in enumerate((0.02, 0.005, 0.3, 1.0)):
        weight = size * torch.randn(64, 64, generator=random)
        parts, dense = by_the_package(weight, mode)
        with_parts(folder, f"model.layers.0.mlp.experts.{expert}.up_proj", parts)
        theirs.append(dense)

    module = load_base(folder).model.layers[0].mlp.switch_mlp.up_proj
    ours = frozen_weight(module).stored(mx.bfloat16)
    assert np.array_equal(np.array(ours.astype(mx.float32)), np.stack(theirs))


@pytest.mark.interop
@pytest.mark.filterwarnings("default")
def test_the_package_reads_a_merge_with_global_scales(tmp_path):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from safetensors.torch import load_file

    folder = write_mixture(tmp_path / "base", "nvfp4")
    merged_as_stored(tmp_path, folder, EXPERTS)
    tensors = load_file(tmp_path / "same" / "model.safetensors")
    scheme = QuantizationScheme(**scheme_of("nvfp4")["config_groups"]["group_0"])
    compressor = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")

    def by_package(path):
        parts = ("weight_packed", "weight_scale", "weight_global_scale")
        state = {part: tensors[f"{path}.{part}"] for part in parts}
        return compressor.decompress(state, scheme)["weight"].float().numpy()

    block = "model.layers.1"
    layer = load_base(tmp_path / "same").model.layers[1]
    q = frozen_weight(layer.self_attn.q_proj).stored(mx.bfloat16).astype(mx.float32)
    assert np.array_equal(np.array(q), by_package(f"{block}.self_attn.q_proj"))

    up = frozen_weight(layer.mlp.switch_mlp.up_proj).stored(mx.bfloat16).astype(mx.float32)
    theirs = [by_package(f"{block}.mlp.experts.{expert}.up_proj") for expert in range(4)]
    assert np.array_equal(np.array(up), np.stack(theirs))
