"""Selection of the modules to quantize, and of their formats.

`format_for` is the rule for `packs quantize`, for quantizing while loading and for `packs plan`.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.nn as nn

from ..config.choices import WEIGHT_MODES, weight_modes_of
from ..errors import PackError, did_you_mean
from ..nn.frozen_weight import CustomWeight, frozen_weight
from ..nn.lora import is_switch_linear
from ..nn.surgery import replace_modules
from ..runtime import mx
from .files import K_QUANTS, quantization_name, stored_quantization
from .geometry import is_named
from .readers import DENSE
from .weight_formats import (
    AFFINE_BITS,
    MLXFormat,
    WeightFormat,
    format_class,
    format_of,
    named_format,
)

if TYPE_CHECKING:
    from .model import BaseModel

_SAMPLED = 1 << 16  # weights of a tensor whose rounding is measured


class RoundingError:
    """What quantizing changes: ||Q(W) - W|| / ||W||, on rows from all over each weight."""

    def __init__(self) -> None:
        self._difference = self._weights = 0.0

    def add(self, w: mx.array, weight_format: WeightFormat) -> None:
        rows = w.reshape(-1, w.shape[-1])
        step = max(1, w.size // _SAMPLED)
        sample = rows[::step]
        change = weight_format.rounded(sample).astype(mx.float32) - sample.astype(mx.float32)
        squares = [mx.square(part.astype(mx.float32)).sum().item() for part in (change, sample)]
        self._difference += step * squares[0]
        self._weights += step * squares[1]

    @property
    def relative(self) -> float:
        """The relative error of all weights; 0 if none was quantized."""
        if not self._weights:
            return 0.0
        return (self._difference / self._weights) ** 0.5


@dataclass(frozen=True)
class QuantizeOptions:
    """The modules to quantize, and their format."""

    # of modules that the other options do not name
    weight_format: WeightFormat = field(default_factory=lambda: named_format("nf4"))
    keep: tuple[str, ...] = ()  # modules left dense: leaf (lm_head), tail or path
    # expressions and bits: paths that one finds become affine, in groups of 64 if not MLX's own
    bits_for: tuple[tuple[str, int], ...] = ()
    max_shard_gb: float = 1.0  # in 10^9 bytes

    def check(self) -> None:
        """The error has all faults."""
        faults = self.weight_format.faults()
        for expression, bits in self.bits_for:
            if bits not in AFFINE_BITS:
                faults.append(f"--bits-for: must give one of {AFFINE_BITS} but gives {bits}.")
            try:
                re.compile(expression)
            except re.error as error:
                faults.append(f"--bits-for: '{expression}' is no regular expression ({error}).")

        if not self.max_shard_gb > 0:
            faults.append(f"--max-shard-gb: must be above 0 but is {self.max_shard_gb}.")

        if faults:
            raise PackError(" ".join(faults))


def check_names(options: QuantizeOptions, paths: Collection[str]) -> None:
    leaves = sorted({path.rpartition(".")[2] for path in paths})

    for name in options.keep:
        # a tied head has no module of its own: its table is the embedding
        if name != "lm_head" and not any(is_named(path, name) for path in paths):
            raise PackError(
                f"--keep {name}: no such module. {did_you_mean(name, leaves)}", "unknown"
            )

    for expression, _ in options.bits_for:
        if not any(re.search(expression, path) for path in paths):
            raise PackError(
                f"--bits-for {expression}: finds no module. There are {', '.join(leaves)}.",
                "unknown",
            )


def format_for(
    path: str,
    shape: tuple[int, ...],
    options: QuantizeOptions,
    kind: str = "linear",
    advice: bool | Mapping = True,
) -> WeightFormat | str:
    """Return the format of the weight of one module, or why it is left dense.

    Args:
        path: of the module.
        shape: [O, D] of its weight; of stacked experts [E, O, D].
        options: as requested.
        kind: ``linear``, ``embedding``, or ``other`` for what else can be quantized.
        advice: of the model's family (mlx-lm's ``quant_predicate``): False for dense, or bits and
            group_size. Options that name the module take precedence.
    """
    if any(is_named(path, name) for name in options.keep):
        return "kept by name"

    weight_format = options.weight_format
    width = shape[-1]
    for expression, bits in options.bits_for:
        if re.search(expression, path):
            group_size = weight_format.group_size if weight_format.native else 64
            if width % group_size:
                raise PackError(
                    f"--bits-for {expression}: {path} has {width} columns, which {group_size} does "
                    "not divide. Keep it dense with --keep."
                )
            return MLXFormat("affine", bits, group_size)

    if not advice:
        return "its family advises so"
    if isinstance(advice, Mapping):
        weight_format = MLXFormat("affine", advice.get("bits", 4), advice.get("group_size", 64))

    if not weight_format.holds(kind):
        return f"{weight_format.mode.upper()} is for linears and embeddings"
    if not weight_format.fits(width):
        return f"width {width} is no multiple of {weight_format.divisor}"
    return weight_format


def formats_for(
    model: nn.Module, options: QuantizeOptions
) -> tuple[dict[str, WeightFormat], dict[str, str]]:
    """The format of each module of a dense model, and why others are left dense, by path."""
    advise = getattr(model, "quant_predicate", None) or (lambda *_: True)
    modules = {
        path: module
        for path, module in reversed(model.named_modules())
        if hasattr(module, "to_quantized") and "weight" in module
    }

    check_names(options, modules)

    formats = {}
    dense = {}
    for path, module in modules.items():
        advice = advise(path, module)
        outcome = format_for(path, module.weight.shape, options, _kind(module), advice)
        if isinstance(outcome, WeightFormat):
            formats[path] = outcome
        else:
            dense[path] = outcome

    return formats, dense


def _kind(module: nn.Module) -> str:
    if isinstance(module, nn.Linear):
        return "linear"
    if isinstance(module, nn.Embedding):
        return "embedding"
    return "other"


def quantize_weights(
    model: nn.Module,
    weights: dict[str, mx.array],
    options: QuantizeOptions,
    rounding: RoundingError | None = None,
) -> dict[str, mx.array]:
    """Quantize a dense checkpoint as its weights are read; one dense weight exists at a time.

    The model gets MLX's modules for native formats. ``rounding`` measures what this changes.
    """
    native = {}
    for path, weight_format in formats_for(model, options)[0].items():
        name = f"{path}.weight"
        if name not in weights:
            continue

        dense = weights.pop(name)
        if rounding is not None:
            rounding.add(dense, weight_format)
        weights |= weight_format.quantize(name, dense)

        if weight_format.native:
            native[path] = weight_format.to_config()

    nn.quantize(model, class_predicate=lambda path, _: native.get(path, False))
    return weights


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


def smaller_formats(base: "BaseModel", requantize: str, changed: Collection[str]) -> Formats:
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
        raise _damaged(where, f"{path}.weight: is missing next to {path}.{parts[0]}.")

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
                where, f"{path}.{part}: is missing next to {name}, which is {mode.upper()}."
            )


def custom_quantization(model: nn.Module) -> dict:
    """Settings of a model's custom weights whose config.json has none; {} for others."""
    settings = (format_of(m).to_config() for m in model.modules() if isinstance(m, CustomWeight))
    return next(settings, {})


def check_not_quantized(quantize: str, config: Mapping, kind: str | None = None) -> None:
    """Check that --quantize has a dense base; ``kind`` is what its tensors are quantized as."""
    if stored := stored_quantization(config):
        kind = quantization_name(stored)
    if quantize == "none" or kind is None:
        return
    other = "the checkpoint that it was made from"
    if K_QUANTS in config:
        other = f"it as {DENSE}FILE.gguf, whose K-quants are dense"
    raise PackError(
        f"--quantize {quantize}: the base is quantized already ({kind}). Leave --quantize out to "
        f"train on it as it is, or name {other}.",
        "conflict",
    )
