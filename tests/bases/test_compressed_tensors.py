"""Checkpoints of compressed-tensors: mxfp4 by its bits, nvfp4 quantized again, or an error."""

import json

import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_packs import LoRAConfig, TrainConfig, load_base
from mlx_packs.bases.compressed_tensors import from_compressed_tensors
from mlx_packs.bases.weight_formats import format_of
from mlx_packs.memory.estimate import estimate
from mlx_packs.memory.read import read_headers
from mlx_packs.nn.frozen_weight import frozen_weight
from mlx_packs.nn.quantized import count_weights, quantized_modules
from mlx_packs.runtime import mx
from tests.bases.changes import set_keys
from tests.helpers.checkpoints import (
    SIZES_OF,
    attached_logits,
    layout,
    logits,
    merged,
    write_files,
)
from tests.helpers.errors import raises
from tests.helpers.fp4 import GROUP_SIZES, dequantized, scheme_of, write_compressed, write_raw
from tests.helpers.models import model_of
from tests.helpers.packs import random_pack

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
            dtype = mx.bfloat16 if mode == "nvfp4" else mx.float32  # as it is read
            dense[f"{path}.weight"] = mx.array(weight, dtype)  # mlx-lm stacks experts
        elif "scale" not in part:
            dense[name] = tensor
    return write_files(folder, dense, config)


def test_weights_in_mxfp4_are_bit_identical_to_the_specification(tmp_path):
    folder = write_compressed(tmp_path / "base", "mxfp4")
    expected = dict(
        tree_flatten(load_base(write_dense_of(tmp_path / "d", folder)).model.parameters())
    )
    base = load_base(folder)
    modules = quantized_modules(base.model)
    assert len(modules) == 14 and base.quantization["mode"] == "mxfp4"

    for path, module in modules:
        weight = frozen_weight(module)
        weight.check()
        dense = expected[f"{path}.weight"]
        assert mx.array_equal(weight.dense(), dense), path
        assert mx.array_equal(weight.rows(slice(3, 9)), dense[3:9])
        assert format_of(module).bits == 4
    assert count_weights(base.model) == count_weights(load_base(tmp_path / "d").model)


@pytest.mark.parametrize("quantize", ["none", "nf4", "affine8"])
def test_nvfp4_is_read_and_quantized_again(tmp_path, quantize, caplog):
    """Without a format to affine4: as its dense weights would be."""
    folder = write_compressed(tmp_path / "base", "nvfp4")
    base = load_base(folder, quantize)
    name = "affine4" if quantize == "none" else quantize
    expected = load_base(write_dense_of(tmp_path / "dense", folder), name)
    assert base.quantization == expected.quantization
    assert np.abs(logits(base) - logits(expected)).max() < 1e-4
    assert base.rounding_error == pytest.approx(expected.rounding_error, rel=1e-3)
    said = [r.message for r in caplog.records if "again" in r.message]
    assert len(said) == 1 and name in said[0] and f"{100 * base.rounding_error:.1f} %" in said[0]


def write_mixture(folder, mode):
    """Experts one by one, each with scales and a global scale of its own; the router is dense."""
    return write_compressed(folder, mode, "qwen3_moe", **SIZES_OF["qwen3_moe"])


def test_experts_in_mxfp4_are_rejected(tmp_path):
    with raises("unsupported", None, "its experts are in mxfp4", "--quantize nf4"):
        load_base(write_mixture(tmp_path / "base", "mxfp4"))


def test_experts_in_nvfp4_are_quantized_again(tmp_path):
    folder = write_mixture(tmp_path / "base", "nvfp4")
    base = load_base(folder)
    dense = load_base(write_dense_of(tmp_path / "dense", folder), "affine4")
    assert np.abs(logits(base) - logits(dense)).max() < 1e-4


@pytest.mark.parametrize("mode", GROUP_SIZES)
def test_a_plan_counts_its_tensors(tmp_path, mode):
    folder = write_compressed(tmp_path / "base", mode)
    base = load_base(folder)
    nbytes = sum(array.nbytes for _, array in tree_flatten(base.model.parameters()))
    train = TrainConfig(matmul_path="transient", compute_dtype="float32")
    assert estimate(read_headers(folder), LoRAConfig(), train).base == nbytes


@pytest.mark.slow
@pytest.mark.parametrize("mode", GROUP_SIZES)
def test_merges_are_dense_or_in_formats_of_mlx(tmp_path, mode):
    folder = write_compressed(tmp_path / "base", mode)
    pack = random_pack(load_base(folder)).save(tmp_path / "pack")
    expected = attached_logits(pack, folder)
    merged(pack, folder, tmp_path / "dense", dtype="float32")
    # a merge rounds weights that were quantized on loading to their dtype on disk, bfloat16
    tolerance = 1e-4 if mode == "mxfp4" else 0.1
    assert np.abs(logits(load_base(tmp_path / "dense")) - expected).max() < tolerance

    merged(pack, folder, tmp_path / "fp4", requantize=mode)
    written = load_base(tmp_path / "fp4")
    assert {format_of(m).mode for _, m in quantized_modules(written.model)} == {mode}
    assert written.quantization["mode"] == mode

    merged(pack, folder, tmp_path / "same", requantize="same")
    same = load_base(tmp_path / "same")
    if mode == "mxfp4":
        assert np.array_equal(logits(same), logits(written))
    else:
        assert same.quantization["mode"] == "affine"


def test_a_merge_of_a_dense_module_beside_mxfp4(tmp_path):
    """The other modules are written by the names of MLX, too."""
    folder = write_compressed(tmp_path / "base", "mxfp4")
    pack = random_pack(load_base(folder), targets=("lm_head",)).save(tmp_path / "pack")
    expected = attached_logits(pack, folder)
    merged(pack, folder, tmp_path / "same", requantize="same", dtype="float32")
    assert np.abs(logits(load_base(tmp_path / "same")) - expected).max() < 1e-4


def edited(**changes):
    def edit(scheme):
        scheme.update(changes)

    return edit


def of_group(part, **changes):
    def edit(scheme):
        group = scheme["config_groups"]["group_0"]
        group[part] = {**(group.get(part) or {}), **changes}

    return edit


UNSUPPORTED = {
    "fp8": (edited(format="float-quantized"), "float-quantized"),
    "no format": (edited(format=None), "nvfp4-pack-quantized"),
    "groups": (of_group("weights", group_size=32), "group_size"),
    "outputs": (of_group("output_activations", num_bits=8), "output_activations"),
    "rotations": (edited(transform_config={"config_groups": {}}), "transform_config"),
    "sparse": (edited(sparsity_config={"format": "sparse-24-bitmask"}), "sparse-24"),
}
UNREADABLE = {
    "a list": (edited(config_groups=[]), "config_groups"),
    "a text": (edited(config_groups={"group_0": {"weights": "W4"}}), "weights"),
}


@pytest.fixture(scope="module")
def nvfp4(tmp_path_factory):
    return write_compressed(tmp_path_factory.mktemp("nvfp4") / "base", "nvfp4")


def with_scheme(folder, edit):
    scheme = scheme_of("nvfp4")
    edit(scheme)
    set_keys(folder / "config.json", quantization_config=scheme)
    return folder


@pytest.mark.parametrize("name", UNSUPPORTED | UNREADABLE)
def test_other_schemes_are_named(nvfp4, name):
    edit, shown = (UNSUPPORTED | UNREADABLE)[name]
    if name in UNSUPPORTED:
        code, names = "unsupported", ("compressed-tensors", "--quantize")
    else:
        code, names = "unreadable", ("config.json",)
    with raises(code, None, shown, *names):
        load_base(with_scheme(nvfp4, edit))


def test_the_list_of_ignored_modules_is_not_read(nvfp4):
    load_base(with_scheme(nvfp4, edited(ignore=["lm_head", UP, "re:(.*)*up_proj", "Linear"])))


def raw(folder):
    """The tensors and dtypes of a checkpoint; those that MLX lacks are bytes."""
    dtypes = {name: dtype for name, (dtype, _) in layout(folder).items()}
    tensors = mx.load(str(folder / "model.safetensors"))
    return {name: (dtypes[name], np.array(tensor)) for name, tensor in tensors.items()}


def without(part):
    return lambda tensors: tensors.pop(f"{UP}.{part}")


def replaced(part, value):
    def replace(tensors):
        tensors[f"{UP}.{part}"] = (tensors[f"{UP}.{part}"][0], value(tensors[f"{UP}.{part}"][1]))

    return replace


TENSORS = {
    "no global scale": (without("weight_global_scale"), "weight_global_scale"),
    "fewer scales": (replaced("weight_scale", lambda a: a[:, :-1]), "weight_scale"),
    "fewer rows": (replaced("weight_packed", lambda a: a[:-1]), "weight_scale"),
    "NaN": (replaced("weight_global_scale", lambda a: a * np.float32("nan")), "global_scale"),
    "NaN of scales": (replaced("weight_scale", lambda a: a | 0x7F), "NaN"),
    "another width": (
        lambda tensors: [
            replaced("weight_packed", lambda a: a[:, :16])(tensors),
            replaced("weight_scale", lambda a: a[:, :2])(tensors),
        ],
        "do not fit",
    ),
}


@pytest.mark.parametrize("name", TENSORS)
def test_damaged_tensors_are_named(tmp_path, name):
    damage, shown = TENSORS[name]
    folder = write_compressed(tmp_path / "base", "nvfp4")
    tensors = raw(folder)
    damage(tensors)
    write_raw(folder / "model.safetensors", tensors)
    with raises("unreadable", None, shown):
        load_base(folder)


def test_a_file_without_packed_weights_is_named(tmp_path):
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


def read(folder):
    """The weights of a checkpoint as loading reads them, dense."""
    config = json.loads((folder / "config.json").read_text())
    weights = mx.load(str(folder / "model.safetensors"))
    return from_compressed_tensors(weights, config, folder, mx.bfloat16)


@pytest.mark.interop
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("mode", GROUP_SIZES)
def test_weights_are_those_of_the_package(tmp_path, mode):
    pytest.importorskip("compressed_tensors")
    import torch

    folder = write_compressed(tmp_path / "base", mode)
    weight = 0.02 * torch.randn(96, 64, generator=torch.Generator().manual_seed(0))
    parts, theirs = by_the_package(weight, mode)
    with_parts(folder, UP, parts)

    weights = read(folder)
    if mode == "mxfp4":
        ours = mx.dequantize(weights[f"{UP}.weight"], weights[f"{UP}.scales"], mode=mode)
        assert np.array_equal(np.array(ours.astype(mx.float32)), theirs)
    else:  # the factor of a group is rounded in another order
        ours = weights[f"{UP}.weight"]
        assert np.allclose(np.array(ours.astype(mx.float32)), theirs, rtol=2**-7, atol=0)
