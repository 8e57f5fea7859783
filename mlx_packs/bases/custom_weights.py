"""Checkpoints in a format that MLX lacks: where their tensors go."""

from collections.abc import Mapping
from pathlib import Path

import mlx.nn as nn

from ..config.choices import WEIGHT_MODES, weight_modes_of
from ..errors import PackError
from ..nn.frozen_weight import CustomWeight, frozen_weight
from ..nn.surgery import replace_modules
from ..runtime import mx
from .files import stored_quantization
from .weight_formats import format_class, format_of

Weights = dict[str, mx.array]


def place_custom_weights(
    model: nn.Module, weights: Weights, dtype: mx.Dtype, config: Mapping, where: Path
) -> None:
    """Put a module wherever the weights are in a format that MLX lacks; they are loaded later.

    ``weights`` have the names of the model; ``dtype`` is of the dense weight where one is needed.
    """
    modes = weight_modes_of(weights)
    _check_no_codes_alone(weights, modes, config, where)

    modules = dict(model.named_modules())
    placed = []
    for path, mode in modes.items():
        if format_class(mode).native:
            continue

        module = modules.get(path)
        if not isinstance(module, (nn.Linear, nn.Embedding)):
            kind = "nothing" if module is None else type(module).__name__
            raise PackError(
                f"{where}: {path}.{WEIGHT_MODES[mode].parts[0]}: {mode.upper()} is read for "
                f"linears and embeddings, here is {kind}.",
                "unsupported",
            )

        quantized = _quantized_module(path, mode, module, weights, dtype, where)

        shape = list(frozen_weight(quantized).shape)
        if shape != list(module.weight.shape):
            raise PackError(
                f"{where}: {path}: is quantized from {shape}, but the config asks for "
                f"{list(module.weight.shape)}.",
                "unreadable",
            )

        placed.append((path, quantized))

    replace_modules(model, placed)


def _quantized_module(
    path: str, mode: str, dense: nn.Module, weights: Weights, dtype: mx.Dtype, where: Path
) -> nn.Module:
    parts = WEIGHT_MODES[mode].parts
    names = {part: f"{path}.{part}" for part in ("weight", *parts)}
    arrays = {part: weights[name] for part, name in names.items() if name in weights}
    if "weight" not in arrays:
        raise _damaged(where, f"{path}.weight: is missing beside {path}.{parts[0]}.")

    try:
        module = format_class(mode).of_arrays(arrays).module_of(dense, arrays, dtype)
    except ValueError as error:
        raise _damaged(where, f"{path}: quantized tensors do not fit: {error}") from None

    for part in parts:
        if part in arrays and not mx.isfinite(arrays[part]).all().item():
            raise _damaged(where, f"{path}.{part}: has NaN or infinite values.")
    return module


def _damaged(where: Path, fault: str) -> PackError:
    return PackError(f"{where}: {fault} The checkpoint is damaged: get it again.", "unreadable")


def _check_no_codes_alone(
    weights: Weights, modes: Mapping[str, str], config: Mapping, where: Path
) -> None:
    """Check that codes have their parts beside them where config.json names the format."""
    quantization = stored_quantization(config)
    if not quantization:
        return
    mode = next((m for m in WEIGHT_MODES if format_class(m)().is_stored(quantization)), None)
    if mode is None:
        return

    for name, tensor in weights.items():
        path = name.removesuffix(".weight")
        codes = name.endswith(".weight") and tensor.dtype in (mx.uint8, mx.int8)
        if codes and path not in modes:
            part = WEIGHT_MODES[mode].parts[0]
            raise _damaged(
                where, f"{path}.{part}: is missing beside {name}, which is {mode.upper()}."
            )


def custom_quantization(model: nn.Module) -> dict:
    """Settings of a model's custom weights whose config.json has none; {} for others."""
    module = next((m for m in model.modules() if isinstance(m, CustomWeight)), None)
    if module is None:
        return {}
    return format_of(module).to_config()


def already_quantized(quantize: str, kind: str) -> PackError:
    """The error of --quantize on a base that is quantized so."""
    return PackError(
        f"--quantize {quantize}: the base is quantized already ({kind}). Leave --quantize out to "
        "train on it as it is, or name the checkpoint that it was made from.",
        "conflict",
    )
