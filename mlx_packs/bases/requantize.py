"""The format that each weight gets where a base is quantized anew with some weights changed.

`packs merge --requantize` writes by these rules.
"""

from collections.abc import Collection

import mlx.nn as nn

from ..config.choices import WEIGHT_MODES
from ..errors import PackError
from ..nn.frozen_weight import frozen_weight
from ..nn.lora import is_switch_linear
from .model import BaseModel
from .weight_formats import WeightFormat, format_of, named_format

Formats = dict[str, WeightFormat | None]  # by path; None is dense


def format_after(path: str, module: nn.Module, requantize: str) -> WeightFormat | None:
    """The format of a module's changed weight; None is dense."""
    stored = format_of(module)

    if requantize == "none":
        return None

    if requantize == "same":
        if stored and stored.mode not in WEIGHT_MODES:
            raise PackError(
                f"--requantize same: {path} is {stored.mode}, which cannot be written. Choose "
                "nvfp4, affine4, affine8 or none.",
                "unsupported",
            )
        return stored

    if stored is None:  # what the base left dense stays so
        return None

    wanted = named_format(requantize)
    if wanted.is_stored(stored.to_config()):
        return stored

    if is_switch_linear(module) and not wanted.holds("other"):
        raise PackError(
            f"--requantize {requantize}: {path} has experts, and {requantize} is for linears "
            "and embeddings. Choose same, affine4 or affine8.",
            "unsupported",
        )

    if not wanted.fits(frozen_weight(module).dense().shape[-1]):
        return None
    return wanted


def smaller_formats(base: BaseModel, requantize: str, changed: Collection[str]) -> Formats:
    """Formats of unchanged weights that become smaller by them, or cannot stay as they are."""
    formats: Formats = {}
    if not base.quantization or requantize == "same":
        return formats

    for path, module in base.model.named_modules():
        if path in changed or not (stored := format_of(module)):
            continue

        wanted = format_after(path, module, requantize)
        is_smaller = wanted is None or wanted.bits_per_weight < stored.bits_per_weight
        if is_smaller or stored.mode not in WEIGHT_MODES:
            formats[path] = wanted

    return formats
