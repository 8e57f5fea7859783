"""What training for a quantized merge (``--for-merge``) takes beside plain LoRA, in bytes."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..bases.quantization import QuantizeOptions, format_for
from ..bases.weight_formats import MLXFormat, named_format
from ..config.schema import TrainConfig

if TYPE_CHECKING:
    from .headers import Headers
    from .planned_adapters import PlannedAdapters

# Bytes in flight for each weight that is rounded, of a quantized and of a dense base. Read off
# peaks on a CPU; a GPU in half precision has fewer.
_BYTES = {True: 16, False: 28}

Modules = Mapping[str, tuple[int, int]]  # path -> (out, in)


def planned_bytes(
    modules: Modules,
    adapters: "PlannedAdapters",
    headers: "Headers",
    train: TrainConfig,
    itemsize: int,
) -> tuple[int, int]:
    """Return what rounding adds to the plan of a run.

    Args:
        modules: the shapes of the base's weights, by path.
        adapters: that the run would attach.
        headers: of the base's checkpoint.
        train: settings with ``for_merge``.
        itemsize: bytes of a number in activations.

    Returns:
        Bytes in flight while the largest adapted weight is rounded.
        Bytes of the weights without adapters that are quantized anew beside the base's.
    """
    adapted = _adapted_paths(modules, adapters)
    quantized = headers.is_quantized or train.quantize != "none"
    largest = max(math.prod(modules[path]) for path in adapted)
    others = {path: shape for path, shape in modules.items() if path not in adapted}
    return _BYTES[quantized] * largest, _requantized_bytes(others, headers, train, itemsize)


def _requantized_bytes(
    others: Modules, headers: "Headers", train: TrainConfig, itemsize: int
) -> int:
    options = QuantizeOptions(named_format(train.for_merge))
    stored = _stored_bits(headers)
    if stored is not None and options.weight_format.bits_per_weight >= stored:
        return 0

    formats = [(format_for(path, shape, options), shape) for path, shape in others.items()]
    return sum(
        weight_format.nbytes(shape, itemsize)
        for weight_format, shape in formats
        if not isinstance(weight_format, str)
    )


def _adapted_paths(modules: Modules, adapters: "PlannedAdapters") -> set[str]:
    """Return the paths of the modules that have adapters."""
    first = 1 + max(int(path.split(".")[2]) for path in modules if "layers" in path)
    first -= len(adapters.kept)
    names = {f"{i}.{name}" for i, block in enumerate(adapters.kept, first) for name in block}
    return {path for path in modules if path.partition("layers.")[2] in names}


def _stored_bits(headers: "Headers") -> float | None:
    """Return the bits of a weight of a base that is stored quantized; None if it is dense."""
    quantization = headers.config.get("quantization") or {}
    if custom := headers.custom_format():
        return custom.bits_per_weight
    if not headers.is_quantized or "bits" not in quantization:
        return None
    mode, group_size = quantization.get("mode", "affine"), quantization["group_size"]
    return MLXFormat(mode, quantization["bits"], group_size).bits_per_weight
