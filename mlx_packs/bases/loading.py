"""Load a base: any model of mlx-lm, dense or quantized, or quantized while it is read."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path

from .. import runtime
from ..config.choices import architecture_of
from ..errors import Float16Overflow, PackError, library_errors, warn_once
from ..nn.frozen_weight import CustomWeight, with_dense_dtype
from ..nn.surgery import replace_modules
from ..runtime import mx
from .bitsandbytes import from_bitsandbytes
from .compressed_tensors import (
    format_on_loading,
    from_compressed_tensors,
    is_read_as_dense,
    quantization_in_mlx,
    without_quantization,
)
from .encoder import load_encoder
from .files import (
    CONFIG,
    TINY,
    check_files,
    files_not_read,
    quantized_as,
    read_config,
    resolve_checkpoint,
    weight_files,
)
from .fingerprint import fingerprint
from .model import BaseModel, Source, weight_map
from .model_classes import classes_of
from .precision import DTYPES, dense_dtype, dtype_of, stored_dtype, with_rounded_scales
from .quantization import (
    QuantizeOptions,
    RoundingError,
    check_not_quantized,
    custom_quantization,
    place_custom_weights,
    quantize_weights,
)
from .sandboxed_tokenizer import read_ahead
from .supported import check_supported
from .tokenizer import load_encoder_tokenizer, load_tokenizer
from .unsupported import unreadable
from .weight_formats import named_format

Weights = dict[str, mx.array]


def load_base_model(
    name: str | Path = TINY,
    quantize: str = "none",
    trust_remote_code: bool = False,
    *,
    double_quant: bool = True,
    keep: Sequence[str] = (),
    compute_dtype: str = "auto",
    lazy: bool = False,
) -> BaseModel:
    """Load a checkpoint and its tokenizer, frozen; arguments as of `packs.base.load_base`.

    Raises:
        PackError: there is no such checkpoint, or its tensors do not fit its config.
    """
    path, stored = _checkpoint(name)
    if architecture_of(stored.get("model_type")) == "encoder":
        return _load_encoder(str(name), path, stored, quantize, compute_dtype, trust_remote_code)

    ahead = read_ahead(path)
    quantize = format_on_loading(stored, quantize)
    options = None
    if quantize != "none":
        options = QuantizeOptions(named_format(quantize, double_quant), tuple(keep))
        check_not_quantized(quantize, stored, quantized_as(path, stored))

    dtype = _activation_dtype(stored, compute_dtype)
    rounding = RoundingError()

    def prepare(model: nn.Module, weights: Weights) -> Weights:
        if options:
            weights = quantize_weights(model, weights, options, rounding)
        place_custom_weights(model, weights, dtype, stored, path)
        return with_rounded_scales(weights, stored, dtype)

    model, config, sources = load_model_of(path, trust_remote_code, prepare)

    quantization = config.get("quantization") or custom_quantization(model)
    if options:
        quantization = options.weight_format.to_config()
        if keep:
            quantization = {**quantization, "keep": list(keep)}

    if is_read_as_dense(stored):
        warn_once(
            "%s: is in nvfp4 with a global scale, which is read and quantized again to %s: its "
            "weights differ by %.1f %%. --quantize chooses another format.",
            path,
            quantize,
            100 * rounding.relative,
        )

    is_cast = runtime.on_cpu() or compute_dtype != "auto"
    _freeze_in(model, dtype, is_cast, lazy)
    return BaseModel(
        name=str(name),
        path=path,
        model=model,
        tokenizer=load_tokenizer(path, config, trust_remote_code, ahead),
        config=config,
        fingerprint=fingerprint(path),
        quantization=dict(quantization),
        weight_map=sources,
        compute_dtype=dtype_of(model),
        is_lazy=lazy,
        rounding_error=rounding.relative if options else None,
    )


def lazy_base(name: str | Path, trust_remote_code: bool = False) -> BaseModel:
    """A base whose weights are not read, in their stored dtypes, without a tokenizer."""
    path, stored = _checkpoint(name)
    if architecture_of(stored.get("model_type")) == "encoder":
        encoder = load_encoder(path, stored, lazy=True)
        return BaseModel(str(name), path, encoder, None, stored, fingerprint(path))

    def prepare(model: nn.Module, weights: Weights) -> Weights:
        place_custom_weights(model, weights, dense_dtype(weights), stored, path)
        return with_rounded_scales(weights, stored, DTYPES[stored_dtype(stored)])

    model, config, sources = load_model_of(path, trust_remote_code, prepare)
    dtype = dense_dtype(dict(tree_flatten(model.parameters())))
    _freeze_in(model, dtype, is_cast=False, lazy=True)

    quantization = config.get("quantization") or custom_quantization(model)
    return BaseModel(
        str(name), path, model, None, config, fingerprint(path), dict(quantization), sources
    )


def load_model_of(
    path: Path, trust_remote_code: bool, prepare: Callable[[nn.Module, Weights], Weights]
) -> tuple[nn.Module, dict, dict[str, Source]]:
    """Load a decoder of mlx-lm or mlx-vlm by mlx-lm's loader, its weights lazy.

    ``prepare`` gets the model and its weights by the model's names, and returns those to load.
    Returns the model, its config, and which tensor of the files each of its weights is.
    """
    from mlx_lm.utils import load_model

    stored = read_config(path / CONFIG)
    if "model_file" in stored and not trust_remote_code:
        raise PackError(
            f"{path}: includes code. --trust-remote-code runs it.",
            "conflict",
            "trust_remote_code",
        )

    # mlx-lm before 0.32, the last for Python 3.10, has no such argument and always runs the code
    flags = {}
    if "trust_remote_code" in inspect.signature(load_model).parameters:
        flags["trust_remote_code"] = True

    known: dict = {}
    named = stored
    if is_read_as_dense(stored):
        named = without_quantization(stored)
        known["quantization_config"] = None
    if "text_config" in named:  # with sizes that its file may lack
        known["text_config"] = named["text_config"]
    if quantization := quantization_in_mlx(stored):  # mlx-lm before 0.32 takes it for affine
        known |= {"quantization": quantization, "quantization_config": quantization}
    flags["model_config"] = known

    sources: dict[str, Source] = {}

    def classes(config: dict) -> tuple[Callable, type]:
        model_class, arguments_class = classes_of(config)

        def make(arguments: object) -> nn.Module:
            model = model_class(arguments)
            to_names_of_model = getattr(model, "sanitize", lambda weights: weights)

            def sanitize(weights: Weights) -> Weights:
                own = dict(weights)
                if files_not_read(path):  # mlx-lm reads every model*.safetensors of a folder
                    files = map(str, weight_files(path))
                    own = {name: w for file in files for name, w in mx.load(file).items()}
                own = from_bitsandbytes(own, str(path))
                own = from_compressed_tensors(own, stored, path, DTYPES[stored_dtype(stored)])
                # the caller keeps this one: nothing else may reference a dense weight
                weights.clear()

                of_files = dict(own)
                named = _with_model_names(to_names_of_model(own), model)

                sources.update(weight_map(of_files, named))
                of_files.clear()
                own.clear()

                _check_scales(named, model, path)
                return prepare(model, named)

            model.sanitize = sanitize
            return model

        return make, arguments_class

    with library_errors(partial(unreadable, path, named)):
        model, config = load_model(path, lazy=True, get_model_classes=classes, **flags)

    vars(model).pop("sanitize", None)
    return model, config, sources


def _with_model_names(weights: Weights, model: nn.Module) -> Weights:
    """The weights of a checkpoint; of one without a head (Qwen3-Embedding) with ``model.``."""
    named = {name for name, _ in tree_flatten(model.parameters())}
    prefixed = {f"model.{name}": tensor for name, tensor in weights.items()}

    if named.isdisjoint(weights) and not named.isdisjoint(prefixed):
        return prefixed
    return dict(weights)


def _check_scales(weights: Weights, model: nn.Module, path: Path) -> None:
    """Check that scales fit quantized weights: MLX ends the process for groups of 0."""

    def damaged(fault: str) -> PackError:
        return PackError(f"{path}: {fault} Copy or download the base again.", "unreadable")

    modules = dict(model.named_modules())
    for name, codes in weights.items():
        module_path = name.removesuffix(".weight")
        if name == module_path or codes.dtype != mx.uint32:
            continue

        dense = getattr(modules.get(module_path), "weight", None)
        scales = weights.get(f"{module_path}.scales")
        if scales is None:
            if dense is not None and codes.shape != dense.shape:
                raise damaged(
                    f"{module_path}.scales is missing next to {name}, which is quantized."
                )
            continue

        fault = f"{module_path}.scales is {list(scales.shape)}, but"
        rows = scales.shape[:-1]
        groups = scales.shape[-1:]
        if not groups or rows != codes.shape[:-1] or not 1 <= groups[0] <= codes.shape[-1]:
            raise damaged(f"{fault} its weight is {list(codes.shape)}.")
        if dense is not None and dense.shape[-1] % groups[0]:
            raise damaged(f"{fault} by {CONFIG} its weight is {list(dense.shape)}.")


def _checkpoint(name: str | Path) -> tuple[Path, dict]:
    """The folder of a checkpoint and its config.json, all files checked."""
    path = resolve_checkpoint(name)
    config = check_files(path)
    check_supported(config, path)
    return path, config


def _load_encoder(
    name: str, path: Path, config: dict, quantize: str, compute_dtype: str, trust_remote_code: bool
) -> BaseModel:
    if quantize != "none":
        raise PackError(
            f"--quantize {quantize}: {name} is an encoder, and those are trained in "
            "float32: `packs plan` says why.",
            "unsupported",
        )
    if compute_dtype not in ("auto", "float32"):
        raise PackError(
            f"--compute-dtype {compute_dtype}: {name} is an encoder, which computes in float32.",
            "unsupported",
        )

    ahead = read_ahead(path)
    model = load_encoder(path, config)
    lower_case = model.sentence_config.lower_case
    tokenizer = load_encoder_tokenizer(path, config, lower_case, trust_remote_code, ahead)
    return BaseModel(name, path, model, tokenizer, config, fingerprint(path))


def _activation_dtype(config: dict, requested: str) -> mx.Dtype:
    """The dtype of hidden states: float32 on a CPU, else the specified or the stored one."""
    if runtime.on_cpu():
        return mx.float32
    if requested == "auto":
        requested = stored_dtype(config)
    return DTYPES[requested]


def _freeze_in(model: nn.Module, dtype: mx.Dtype, is_cast: bool, lazy: bool) -> None:
    """Freeze a model that computes in a dtype, and read its weights unless it is lazy."""
    _set_dense_dtype(model, dtype)
    names = _cast(model, dtype) if is_cast else []
    model.freeze()
    model.eval()

    if not lazy:
        mx.eval(model.parameters(), constants_of(model))
        if names and dtype == mx.float16:
            _check_range(model, names)


def _set_dense_dtype(model: nn.Module, dtype: mx.Dtype) -> None:
    replaced = []
    for path, module in model.named_modules():
        other = with_dense_dtype(module, dtype)
        if other is not module:
            replaced.append((path, other))

    replace_modules(model, replaced)


def constants_of(model: nn.Module) -> list[mx.array]:
    """Return the arrays that modules keep beside their parameters, such as frequencies of rope.

    What is not computed yet belongs to the thread that made it; a server computes in another.
    """
    arrays = []
    for module in model.modules():
        private = [value for name, value in module.items() if name.startswith("_")]
        arrays += [x for x in (*private, *vars(module).values()) if isinstance(x, mx.array)]
    return arrays


def _cast(model: nn.Module, dtype: mx.Dtype) -> list[str]:
    """Cast the floating tensors of a model, and return their names.

    Custom weights stay as they are, and on a GPU what the model itself keeps apart
    (mlx-lm's ``cast_predicate``).
    """
    changed = (mx.float16, mx.bfloat16)
    if not runtime.on_cpu():
        changed = (*changed, mx.float32)

    casts = getattr(model, "cast_predicate", None)
    custom = [path for path, m in model.named_modules() if isinstance(m, CustomWeight)]
    prefixes = tuple(f"{path}." for path in custom)
    names = []

    def converted(name: str, value: mx.array) -> mx.array:
        is_apart = casts is not None and not runtime.on_cpu() and not casts(name)
        if value.dtype not in changed or is_apart or name.startswith(prefixes):
            return value
        names.append(name)
        return value.astype(dtype)

    model.update(tree_map_with_path(converted, model.parameters()))
    return names


def _check_range(model: nn.Module, names: Sequence[str]) -> None:
    """Raise Float16Overflow if one of these tensors was too large for float16."""
    tensors = dict(tree_flatten(model.parameters()))
    fits = mx.stack([mx.isfinite(tensors[name]).all() for name in names]).tolist()
    if not all(fits):
        raise Float16Overflow(f"{names[fits.index(False)]} overflows")
