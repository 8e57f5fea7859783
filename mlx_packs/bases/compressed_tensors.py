"""4-bit floating checkpoints of the package compressed-tensors.

Beside a packed weight, bytes [O, D / 2], they have ``weight_scale``, a byte for each group. mxfp4
is read as MLX's format, the same bits. nvfp4 also has ``weight_global_scale``: a weight is its code
times scale / global scale. MLX's modules have no such scale, so these weights are read as dense
ones, and loading quantizes the base again.
"""

import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import PackError, file_errors
from ..kinds import check_keys
from .unsupported import INSTEAD

if TYPE_CHECKING:
    from ..runtime import mx

METHOD = "compressed-tensors"  # quant_method in a config.json
_REQUANTIZED = "affine4"
_FORMATS = {"nvfp4-pack-quantized": 16, "mxfp4-pack-quantized": 32}  # and their group sizes
_PARTS = ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale")
_EXPERT = re.compile(r".+\.experts\.\d{1,9}\.\w+\.weight_packed")
_BY_FAMILIES = "pack-quantized"  # integers, which mlx-lm reads for some families
_REMEDY = "Download the checkpoint again."
_KEYS = {
    "format": "text?",
    "config_groups": "a mapping?",
    "config_groups.*": "a mapping",
    "config_groups.*.format": "text?",
    **dict.fromkeys(("transform_config", "sparsity_config"), "a mapping?"),
    **{f"config_groups.*.{part}": "a mapping?" for part in ("weights", "output_activations")},
}


def is_compressed(config: Mapping) -> bool:
    """Return whether a config.json is of a checkpoint of compressed-tensors."""
    return bool(_stored(config))


def is_read_as_dense(config: Mapping) -> bool:
    """Return whether a checkpoint is in nvfp4 by compressed-tensors."""
    return _stored(config).get("format") == "nvfp4-pack-quantized"


def format_on_loading(config: Mapping, quantize: str) -> str:
    """Return the format that loading quantizes a base to, if ``quantize`` is asked for."""
    if quantize == "none" and is_read_as_dense(config):
        return _REQUANTIZED
    return quantize


def quantization_in_mlx(config: Mapping) -> dict:
    """Return MLX's settings of these bits as mlx-lm puts them in a config; {} if it has none."""
    if _stored(config).get("format") != "mxfp4-pack-quantized":
        return {}
    return {"group_size": _FORMATS["mxfp4-pack-quantized"], "bits": 4, "mode": "mxfp4"}


def without_quantization(config: Mapping) -> dict:
    """Return a config without its quantization, as a dense checkpoint has it."""
    plain = {k: v for k, v in config.items() if k not in ("quantization", "quantization_config")}
    if "text_config" in plain:
        text = plain["text_config"]
        plain["text_config"] = {k: v for k, v in text.items() if k != "quantization_config"}
    return plain


def check_compressed(path: Path, config: Mapping, tensors: Collection[str]) -> None:
    """Check a checkpoint of compressed-tensors: that weights in mxfp4 or nvfp4 are all it needs."""
    stored = _stored(config)
    if not stored:
        return

    with file_errors(path / "config.json", _REMEDY):
        check_keys(dict(stored), _KEYS, "quantization_config")

    _check_scheme(path, stored)
    is_packed = any(name.endswith(".weight_packed") for name in tensors)
    if stored.get("format") in _FORMATS and not is_packed:
        raise PackError(
            f"{path}: config.json says {stored['format']}, but no tensor is a weight_packed. "
            f"{_REMEDY}",
            "unreadable",
        )
    # mlx-lm stacks the weights of experts without their scales
    if quantization_in_mlx(config) and any(map(_EXPERT.fullmatch, tensors)):
        raise _unsupported(path, "its experts are in mxfp4, and stored one by one")


def _stored(config: Mapping) -> Mapping:
    """The ``quantization_config`` of compressed-tensors; {} where the config has another."""
    text = config.get("text_config") or {}
    stored = config.get("quantization_config") or text.get("quantization_config") or {}
    if stored.get("quant_method") != METHOD or config.get("quantization"):
        return {}
    return stored


def _check_scheme(path: Path, stored: Mapping) -> None:
    kind = stored.get("format")
    if kind == _BY_FAMILIES:
        return
    if kind not in _FORMATS:
        raise _unsupported(path, f"its format is {kind}; {' and '.join(_FORMATS)} are read")

    groups = stored.get("config_groups") or {}
    for name, group in groups.items():
        if fault := _fault_of(group, kind):
            raise _unsupported(path, f"config_groups.{name}: {fault}")

    if stored.get("transform_config"):
        raise _unsupported(path, "its transforms (transform_config) are not computed here")
    sparsity = (stored.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise _unsupported(path, f"its weights are sparse ({sparsity})")


def _fault_of(group: Mapping, kind: str) -> str:
    """Return what of a group of modules cannot be computed, or nothing."""
    weights = group.get("weights") or {}
    needed = {
        "format": (group.get("format") or kind, kind),
        "weights.num_bits": (weights.get("num_bits"), 4),
        "weights.type": (weights.get("type"), "float"),
        "weights.group_size": (weights.get("group_size"), _FORMATS[kind]),
        "weights.symmetric": (weights.get("symmetric", True), True),
        "output_activations": (group.get("output_activations") or None, None),
    }
    for key, (value, expected) in needed.items():
        if value != expected:
            return f"{key} is {value}, but must be {expected}"
    return ""


def _unsupported(path: Path, fault: str) -> PackError:
    return PackError(f"{path}: is quantized by {METHOD}: {fault}. {INSTEAD}", "unsupported")


def from_compressed_tensors(
    weights: dict[str, "mx.array"], config: Mapping, where: Path, dtype: "mx.Dtype"
) -> dict[str, "mx.array"]:
    """Return the weights of a checkpoint by MLX's names, lazily; nvfp4 is dense in ``dtype``."""
    group_size = _FORMATS.get(_stored(config).get("format", ""))
    if group_size is None:
        return weights

    renamed = dict(weights)
    for name in weights:
        path, _, part = name.rpartition(".")
        if part not in ("weight_packed", "weight_scale") or f"{path}.weight" in renamed:
            continue

        parts = {stored: renamed.pop(f"{path}.{stored}", None) for stored in _PARTS}
        with file_errors(f"{where}: {path}", _REMEDY):
            _check_shapes(parts, group_size)
            tensors = _in_mlx(parts, dtype)
            renamed |= {f"{path}.{part}": array for part, array in tensors.items()}

    return renamed


def _check_shapes(parts: Mapping[str, "mx.array | None"], group_size: int) -> None:
    from ..runtime import mx

    needed = _PARTS[:3] if group_size == 16 else _PARTS[:2]
    for name in needed:
        if parts[name] is None:
            raise ValueError(f"{name} is missing.")

    codes = parts["weight_packed"]
    scales = parts["weight_scale"]
    if codes.dtype != mx.uint8 or codes.ndim != 2 or 2 * codes.shape[1] % group_size:
        raise ValueError(
            f"weight_packed must be bytes [O, D / 2], and {group_size} divide D, but is "
            f"{codes.dtype} {list(codes.shape)}."
        )

    expected = [codes.shape[0], 2 * codes.shape[1] // group_size]
    if scales.dtype != mx.uint8 or list(scales.shape) != expected:
        raise ValueError(
            f"weight_scale must be bytes {expected} but is {scales.dtype} {list(scales.shape)}."
        )


def _in_mlx(parts: Mapping[str, "mx.array"], dtype: "mx.Dtype") -> dict[str, "mx.array"]:
    """Scales are read: a ValueError names those that are no numbers."""
    from ..nn.frozen_weight import LARGEST_NVFP4
    from ..runtime import mx

    words = parts["weight_packed"].view(mx.uint32)
    scales = parts["weight_scale"]
    global_scale = parts["weight_global_scale"]

    if global_scale is None:
        if (scales == 0xFF).any().item():  # E8M0
            raise ValueError("weight_scale has NaN.")
        return {"weight": words, "scales": scales}

    if ((scales & 0x7F) == 0x7F).any().item():  # E4M3
        raise ValueError("weight_scale has NaN.")
    if global_scale.size != 1 or not 0 < global_scale.item() < math.inf:
        raise ValueError("weight_global_scale must be one number above 0.")

    largest = LARGEST_NVFP4 / global_scale.reshape(())
    weight = mx.dequantize(words, scales, mode="nvfp4", global_scale=largest, dtype=mx.float32)
    return {"weight": weight.astype(dtype)}


def renamed_headers(
    tensors: Mapping[str, Mapping], config: Mapping, dense_dtype: str
) -> dict[str, Mapping]:
    """Return headers of tensors as `from_compressed_tensors` returns the tensors."""
    dense = is_read_as_dense(config)
    renamed = {}
    for name, tensor in tensors.items():
        path, _, part = name.rpartition(".")
        is_packed = tensors.get(f"{path}.weight_packed", {}).get("dtype") == "U8"
        if not is_packed:
            renamed[name] = tensor
        elif part == "weight_packed":
            *rows, columns = tensor["shape"]
            header = {"dtype": "U32", "shape": [*rows, columns // 4]}
            if dense:
                header = {"dtype": dense_dtype, "shape": [*rows, columns * 2]}
            renamed[f"{path}.weight"] = header
        elif part == "weight_scale" and not dense:
            renamed[f"{path}.scales"] = {**tensor, "dtype": "U8"}
        elif part not in _PARTS:
            renamed[name] = tensor

    return renamed
