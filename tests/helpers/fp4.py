"""The 4-bit floating formats by their specifications, in NumPy and without MLX's own code.

mxfp4: OCP Microscaling Formats 1.0. nvfp4: FP8 scales (E4M3), and one float32 for the tensor.
"""

import importlib
import json
from pathlib import Path

import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from mlx_packs.runtime import mx
from tests.helpers.checkpoints import write_files
from tests.helpers.models import model_of

GROUP_SIZES = {"mxfp4": 32, "nvfp4": 16}
_MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # E2M1
_LEVELS = np.array(_MAGNITUDES + [-m for m in _MAGNITUDES], np.float32)
SIZES = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 4096}


def e4m3(code: int) -> float:
    """The FP8 number of a byte."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent = code >> 3 & 0xF
    mantissa = code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


_E4M3 = np.array([e4m3(code) for code in range(256)], np.float32)


def codes_of(packed: np.ndarray) -> np.ndarray:
    """The codes [O, D] of bytes [O, D / 2], of which the lower half comes first."""
    packed = np.ascontiguousarray(packed).view(np.uint8)
    return np.stack([packed & 0xF, packed >> 4], -1).reshape(len(packed), -1)


def dequantized(
    packed: np.ndarray, scales: np.ndarray, mode: str, global_scale: float | None = None
) -> np.ndarray:
    """The weight [O, D], float32, of codes (of any type of words) and bytes of scales."""
    levels = _LEVELS[codes_of(packed)]
    factors = np.ldexp(np.float32(1), scales.astype(np.int32) - 127)
    if mode == "nvfp4":
        factors = _E4M3[scales]
    if global_scale is not None:
        factors = factors / np.float32(global_scale)
    return levels * np.repeat(factors.astype(np.float32), GROUP_SIZES[mode], axis=1)


def write_fp4(folder: Path, mode: str, family: str = "qwen3", **changes) -> Path:
    """Write a small random checkpoint in one of MLX's formats, embedding and head too."""
    model, config = model_of(family, **SIZES | changes)
    nn.quantize(model, GROUP_SIZES[mode], 4, mode=mode)
    config["quantization"] = {"group_size": GROUP_SIZES[mode], "bits": 4, "mode": mode}
    return write_files(folder, dict(tree_flatten(model.parameters())), config)


def write_dequantized(folder: Path, source: Path) -> Path:
    """Write a checkpoint of `write_fp4` with dense weights, dequantized by NumPy."""
    config = json.loads((source / "config.json").read_text())
    mode = config.pop("quantization")["mode"]
    tensors = mx.load(str(source / "model.safetensors"))

    dense = {}
    for name, tensor in tensors.items():
        scales = tensors.get(f"{name.removesuffix('.weight')}.scales")
        if name.endswith(".weight") and scales is not None:
            tensor = mx.array(dequantized(np.array(tensor), np.array(scales), mode))
        if not name.endswith(".scales"):
            dense[name] = tensor
    return write_files(folder, dense, config)


def write_compressed(folder: Path, mode: str, family: str = "qwen3", **changes) -> Path:
    """Write a checkpoint as compressed-tensors does: linears of the blocks are quantized."""
    model, config = model_of(family, **SIZES | changes)
    tensors = dict(tree_flatten(model.parameters()))
    packed = {}
    for name, tensor in tensors.items():
        path = name.removesuffix(".weight")
        if "proj" not in path:
            packed[name] = ("F32", np.array(tensor))
            continue
        for place, weight in _experts_apart(path, tensor):
            packed |= {f"{place}.{part}": value for part, value in compressed(weight, mode).items()}

    config["quantization_config"] = scheme_of(mode)
    write_files(folder, tensors, config)
    write_raw(folder / "model.safetensors", packed)
    return folder


def _experts_apart(path: str, tensor: mx.array) -> list[tuple[str, mx.array]]:
    """Names and weights of experts, which differ in size and so in global scale; or of a linear."""
    if tensor.ndim == 2:
        return [(path, tensor)]
    return [
        (path.replace("switch_mlp", f"experts.{expert}"), (1 + expert) * weight)
        for expert, weight in enumerate(tensor)
    ]


def compressed(weight: mx.array, mode: str) -> dict[str, tuple[str, np.ndarray]]:
    """A weight as compressed-tensors stores it: dtypes of safetensors and arrays by part."""
    if mode == "mxfp4":
        codes, scales = mx.quantize(weight, mode=mode)
        return {
            "weight_packed": ("U8", np.array(codes).view(np.uint8)),
            "weight_scale": ("U8", np.array(scales)),
        }

    largest = mx.abs(weight).max()
    codes, scales = mx.quantize(weight, mode=mode, global_scale=largest)
    return {
        "weight_packed": ("U8", np.array(codes).view(np.uint8)),
        "weight_scale": ("F8_E4M3", np.array(scales)),
        "weight_global_scale": ("F32", np.array([6 * 448 / largest.item()], np.float32)),
        "input_global_scale": ("F32", np.array([12.0], np.float32)),
    }


def scheme_of(mode: str) -> dict:
    """The ``quantization_config`` of such a checkpoint; nvfp4 quantizes activations, too."""
    weights = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "group_size": GROUP_SIZES[mode],
        "strategy": "group" if mode == "mxfp4" else "tensor_group",
        "dynamic": False,
    }
    activations = None
    if mode == "nvfp4":
        activations = {**weights, "dynamic": "local"}

    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": f"{mode}-pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
    }


def write_raw(file: Path, tensors: dict[str, tuple[str, np.ndarray]]) -> None:
    """Write safetensors of dtypes that NumPy lacks; arrays have the bytes."""
    header = {}
    end = 0
    for name, (dtype, array) in tensors.items():
        begin, end = end, end + array.nbytes
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [begin, end]}

    text = json.dumps(header).encode()
    data = b"".join(np.ascontiguousarray(array).tobytes() for _, array in tensors.values())
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def gpt_oss_config() -> dict:
    """Of two blocks of four experts, whose weights are in mxfp4."""
    return {
        "model_type": "gpt_oss",
        **{"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "head_dim": 16},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 4096},
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
        "rope_theta": 10000,
        "layer_types": ["sliding_attention", "full_attention"],
        "quantization_config": {"quant_method": "mxfp4"},
    }


def write_gpt_oss(folder: Path, dense: Path) -> None:
    """Write a random gpt-oss in OpenAI's layout, and the same with experts dequantized by NumPy.

    Gate and up projections alternate by rows; a block has 16 bytes and a scale.
    """
    config = gpt_oss_config()
    module = importlib.import_module("mlx_lm.models.gpt_oss")
    mx.random.seed(3)
    tensors = dict(tree_flatten(module.Model(module.ModelArgs.from_dict(config)).parameters()))

    stored = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    plain = dict(stored)
    for block in range(config["num_hidden_layers"]):
        experts = f"model.layers.{block}.mlp.experts."
        of = {part: tensors[f"{experts}{part}_proj.weight"] for part in ("gate", "up", "down")}
        bias = {part: tensors[f"{experts}{part}_proj.bias"] for part in ("gate", "up", "down")}

        pairs = mx.stack([of["gate"], of["up"]], 2).flatten(1, 2)
        for name, weight in (("gate_up_proj", pairs), ("down_proj", of["down"])):
            codes, scales = mx.quantize(weight, mode="mxfp4")
            packed = mx.contiguous(codes).view(mx.uint8).reshape(*scales.shape, 16)
            stored[f"{experts}{name}_blocks"] = packed
            stored[f"{experts}{name}_scales"] = scales

            rows = np.array(codes).reshape(-1, codes.shape[-1])
            values = dequantized(rows, np.array(scales).reshape(len(rows), -1), "mxfp4")
            plain[f"{experts}{name}"] = mx.array(values.reshape(weight.shape))

        stored[f"{experts}gate_up_proj_bias"] = mx.stack([bias["gate"], bias["up"]], 2).flatten(1)
        stored[f"{experts}down_proj_bias"] = bias["down"]
        both = plain.pop(f"{experts}gate_up_proj")
        plain[f"{experts}gate_proj.weight"] = mx.contiguous(both[:, ::2])
        plain[f"{experts}up_proj.weight"] = mx.contiguous(both[:, 1::2])
        plain[f"{experts}down_proj.weight"] = plain.pop(f"{experts}down_proj")
        plain |= {f"{experts}{part}_proj.bias": b for part, b in bias.items()}

    write_files(folder, stored, config)
    config.pop("quantization_config")
    write_files(dense, plain, config)
