"""Checkpoints that are stored in NF4: where their tensors go, and which settings they allow."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import mlx.nn as nn

from ..errors import PackError
from ..nn.frozen_weight import CustomWeight
from ..nn.nf4 import NF4Embedding, NF4Linear
from ..nn.quantized import replace_modules
from ..ops.nf4 import BLOCK_SIZES, NF4Weight
from ..runtime import mx
from .files import quantization_name, stored_quantization
from .shapes import is_named
from .weight_formats import FORMATS, format_of

Weights = dict[str, mx.array]
_PARTS = ("weight", "absmax", "nested_absmax", "offset")


def place_nf4(
    model: nn.Module, weights: Weights, dtype: mx.Dtype, config: Mapping, where: Path
) -> None:
    """Put an NF4 module wherever the weights are NF4; the tensors are loaded into it later.

    ``weights`` have the names of the model; ``dtype`` is of the dense weight where one is needed. A
    config.json that names NF4 must have absmax beside all codes.
    """
    if FORMATS["nf4"].is_stored(stored_quantization(config)):
        _check_no_codes_alone(weights, where)
    modules = dict(model.named_modules())
    placed = []
    for path in [name.removesuffix(".absmax") for name in weights if name.endswith(".absmax")]:
        module = modules.get(path)
        if not isinstance(module, (nn.Linear, nn.Embedding)):
            kind = "nothing" if module is None else type(module).__name__
            raise PackError(
                f"{where}: {path}.absmax: NF4 is read for linears and embeddings, here is {kind}.",
                "unsupported",
            )
        weight = _nf4_weight(path, weights, where)
        if list(weight.shape) != list(module.weight.shape):
            raise PackError(
                f"{where}: {path}: is quantized from {list(weight.shape)}, but the config asks for "
                f"{list(module.weight.shape)}.",
                "unreadable",
            )
        if isinstance(module, nn.Embedding):
            placed.append((path, NF4Embedding(weight, dtype)))
        else:
            placed.append((path, NF4Linear(weight, module.get("bias"), dtype)))
    replace_modules(model, placed)


def _nf4_weight(path: str, weights: Weights, where: Path) -> NF4Weight:
    """Return the NF4 weight of the module at a path, its codes lazy."""
    parts = {part: weights.get(f"{path}.{part}") for part in _PARTS}
    if parts["weight"] is None:
        raise _damaged(where, f"{path}.weight: is missing beside {path}.absmax.")
    block_size = _block_size(parts["weight"], parts["absmax"])
    try:
        weight = NF4Weight(*parts.values(), block_size)
    except ValueError as error:
        raise _damaged(where, f"{path}: quantized tensors do not fit: {error}") from None
    for part in _PARTS[1:]:
        if parts[part] is not None and not mx.isfinite(parts[part]).all().item():
            raise _damaged(where, f"{path}.{part}: has NaN or infinite values.")
    return weight


def _damaged(where: Path, fault: str) -> PackError:
    return PackError(f"{where}: {fault} The checkpoint is damaged: get it again.", "unreadable")


def _check_no_codes_alone(weights: Weights, where: Path) -> None:
    """Check that no weight of an NF4 checkpoint has codes but no absmax."""
    for name, tensor in weights.items():
        path = name.removesuffix(".weight")
        scaled = f"{path}.absmax" in weights or f"{path}.scales" in weights
        if name.endswith(".weight") and tensor.dtype == mx.uint8 and not scaled:
            raise _damaged(where, f"{path}.absmax: is missing beside {name}, which is NF4.")


def _block_size(weight: mx.array, absmax: mx.array) -> int:
    """Return the block size for so many absmax; the default if none does."""
    fitting = [b for b in BLOCK_SIZES if -(-2 * weight.size // b) == absmax.size]
    return fitting[0] if len(fitting) == 1 else 64


def nf4_quantization(model: nn.Module) -> dict:
    """Return the quantization settings of an NF4 model whose config.json has none; {} for others."""
    module = next((m for m in model.modules() if isinstance(m, CustomWeight)), None)
    return {} if module is None else format_of(module).to_config()


def stored_as_asked(config: Mapping, quantize: str) -> bool:
    """Return whether --quantize asks a checkpoint for the format that it is stored in."""
    quantization = stored_quantization(config)
    if quantize == "none" or not quantization:
        return False
    if FORMATS[quantize].is_stored(quantization):
        return True
    raise already_quantized(quantize, quantization_name(quantization))


def already_quantized(quantize: str, kind: str) -> PackError:
    """Return the error for quantizing a base that is quantized already."""
    return PackError(
        f"--quantize {quantize}: the base is quantized already ({kind}). Train on it as it is, or "
        "name the checkpoint that it was made from.",
        "conflict",
    )


def check_stored_nf4(
    modules: Sequence[tuple[str, bool]], name: str, double_quant: bool, keep: Sequence[str]
) -> None:
    """Check that an NF4 base is stored as --quantize nf4 asks for; it then stays as it is.

    ``modules``: paths of its NF4 modules, and whether each is double-quantized.
    """
    if other := next((path for path, double in modules if double != double_quant), None):
        stored = "single" if double_quant else "double"
        raise PackError(
            f"--quantize nf4: {name} is NF4 already, {stored}-quantized ({other}). Leave "
            "--no-double-quant as the base has it.",
            "conflict",
            "double_quant",
        )
    for dense in keep:
        if path := next((path for path, _ in modules if is_named(path, dense)), None):
            raise PackError(
                f"--keep {dense}: {name} is NF4 already, {path} too. Take the checkpoint that it "
                "was made from.",
                "conflict",
            )
