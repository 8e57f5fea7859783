"""Load a base: any model of mlx-lm, dense or quantized, or quantized while it is read."""

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.nn as nn
from mlx.utils import tree_map

from .. import runtime
from ..errors import PackError
from ..files import read_json
from ..nn.quantized import NF4
from ..runtime import mx
from .bitsandbytes import from_bitsandbytes
from .encoder import load_encoder
from .families import architecture_of
from .files import (
    TINY,
    check_files,
    fingerprint,
    quantized_as,
    resolve_checkpoint,
    text_config,
)
from .model import BaseModel
from .nf4 import check_stored_nf4, nf4_quantization, place_nf4, quantized_already, stored_as_asked
from .quantization import QuantizeOptions, quantize_weights
from .tokenizer import load_encoder_tokenizer, load_tokenizer
from .unsupported import reason_of, unreadable
from .weight_formats import named_format
from .weight_map import Source, weight_map

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
    options = None
    if quantize != "none":
        options = QuantizeOptions(named_format(quantize, double_quant), tuple(keep))
    path, stored = _checkpoint(name)
    if architecture_of(stored, path) == "encoder":
        return _load_encoder(name, path, stored, quantize, compute_dtype, trust_remote_code)
    as_stored = stored_as_asked(stored, quantize)
    options = None if as_stored else options
    if options and (kind := quantized_as(path, stored)):
        raise quantized_already(quantize, kind)
    dtype = _activation_dtype(stored, compute_dtype)

    def prepare(model: nn.Module, weights: Weights) -> Weights:
        if options:
            weights = quantize_weights(model, weights, options)
        place_nf4(model, weights, dtype, stored, path)
        return weights

    model, config, sources = load_model_of(path, trust_remote_code, prepare)
    if as_stored:
        modules = [(p, m.double_quant) for p, m in model.named_modules() if isinstance(m, NF4)]
        check_stored_nf4(modules, str(name), double_quant, keep)
    quantization = config.get("quantization") or nf4_quantization(model)
    if options:
        quantization = options.weight_format.to_config() | ({"keep": list(keep)} if keep else {})
    if runtime.on_cpu() or compute_dtype != "auto":
        _cast(model, dtype)
    model.freeze()
    model.eval()
    if not lazy:
        mx.eval(model.parameters())
    tokenizer = load_tokenizer(path, config, trust_remote_code)
    return BaseModel(
        str(name), path, model, tokenizer, config, fingerprint(path), dict(quantization), sources
    )


def lazy_base(name: str | Path, trust_remote_code: bool = False) -> BaseModel:
    """Return a base whose weights are not read, in their stored dtypes, without a tokenizer.

    Raises:
        PackError: as of `load_base_model`.
    """
    path, stored = _checkpoint(name)
    if architecture_of(stored, path) == "encoder":
        model = load_encoder(path, stored, lazy=True)
        return BaseModel(str(name), path, model, None, stored, fingerprint(path))

    def prepare(model: nn.Module, weights: Weights) -> Weights:
        place_nf4(model, weights, _dense_dtype(weights), stored, path)
        return weights

    model, config, sources = load_model_of(path, trust_remote_code, prepare)
    model.freeze()
    model.eval()
    quantization = config.get("quantization") or nf4_quantization(model)
    return BaseModel(
        str(name), path, model, None, config, fingerprint(path), dict(quantization), sources
    )


def load_model_of(
    path: Path, trust_remote_code: bool, prepare: Callable[[nn.Module, Weights], Weights]
) -> tuple[nn.Module, dict, dict[str, Source]]:
    """Load a model by mlx-lm's loader, its weights lazy.

    Args:
        path: the folder of a decoder.
        trust_remote_code: run code that the checkpoint brings.
        prepare: gets the model and its weights by the model's names, and returns those to load.

    Returns:
        The model, its config, and which tensor of the files each of its weights is.

    Raises:
        PackError: mlx-lm cannot read it.
    """
    from mlx_lm.utils import _get_classes, load_model

    stored = read_json(path / "config.json")
    if architecture_of(stored, path) == "encoder":
        raise PackError(
            f"{path}: is an encoder ({stored['model_type']}) and stays in float32; this is for "
            "causal models.",
            "unsupported",
        )
    if "model_file" in stored and not trust_remote_code:
        raise PackError(
            f"{path}: brings code of its own; --trust-remote-code runs it.",
            "conflict",
            "trust_remote_code",
        )
    # mlx-lm before 0.32, the last for Python 3.10, has no such argument and always runs the code
    known = "trust_remote_code" in inspect.signature(load_model).parameters
    sources: dict[str, Source] = {}

    def classes(config: dict) -> tuple[Callable, type]:
        model_class, arguments_class = _get_classes(config)

        def make(arguments: object) -> nn.Module:
            model = model_class(arguments)
            to_names_of_model = getattr(model, "sanitize", lambda weights: weights)

            def sanitize(weights: Weights) -> Weights:
                own = from_bitsandbytes(dict(weights), str(path))
                weights.clear()  # the caller keeps this one: nothing else may hold a dense weight
                stored = dict(own)
                named = dict(to_names_of_model(own))
                sources.update(weight_map(stored, named))
                stored.clear()
                own.clear()
                return prepare(model, named)

            model.sanitize = sanitize
            return model

        return make, arguments_class

    try:
        model, config = load_model(
            path,
            lazy=True,
            get_model_classes=classes,
            **({"trust_remote_code": True} if known else {}),
        )
    except (ValueError, KeyError, TypeError, UnboundLocalError) as error:
        raise unreadable(path, stored, reason_of(error)) from None
    except RuntimeError as error:
        raise PackError(
            f"{path}: cannot be read: {' '.join(str(error).split())}", "unreadable"
        ) from None
    vars(model).pop("sanitize", None)
    return model, config, sources


def _checkpoint(name: str | Path) -> tuple[Path, dict]:
    """Return the folder of a checkpoint, whose files are checked, and its config.json."""
    path = resolve_checkpoint(name)
    return path, check_files(path)


def _load_encoder(
    name: str | Path, path: Path, config: dict, quantize: str, compute_dtype: str, trust: bool
) -> BaseModel:
    """Load an encoder, in float32 on every device."""
    if quantize != "none":
        raise PackError(
            f"--quantize {quantize}: {name} is an encoder, and those are trained in float32: "
            "`packs plan` says why.",
            "unsupported",
        )
    if compute_dtype not in ("auto", "float32"):
        raise PackError(
            f"--compute-dtype {compute_dtype}: {name} is an encoder, which computes in float32.",
            "unsupported",
        )
    model = load_encoder(path, config)
    tokenizer = load_encoder_tokenizer(path, config, model.sentence_config.lower_case, trust)
    return BaseModel(str(name), path, model, tokenizer, config, fingerprint(path))


def _activation_dtype(config: dict, wanted: str) -> mx.Dtype:
    """Return the dtype of hidden states: float32 on a CPU, else as asked for or as stored."""
    if runtime.on_cpu():
        return mx.float32
    if wanted != "auto":
        return {"float16": mx.float16, "float32": mx.float32, "bfloat16": mx.bfloat16}[wanted]
    named = str(text_config(config).get("torch_dtype") or text_config(config).get("dtype"))
    return {"float16": mx.float16, "float32": mx.float32}.get(named, mx.bfloat16)


def _cast(model: nn.Module, dtype: mx.Dtype) -> None:
    """Take the floating tensors of a model to a dtype, but for the parts of NF4 weights."""
    half = (mx.float16, mx.bfloat16)
    changed = half if runtime.on_cpu() else (*half, mx.float32)
    exempt = {id(v) for m in model.modules() if isinstance(m, NF4) for v in m.values()}
    model.update(
        tree_map(
            lambda a: a.astype(dtype) if a.dtype in changed and id(a) not in exempt else a,
            model.parameters(),
        )
    )


def _dense_dtype(weights: Weights) -> mx.Dtype:
    """Return the dtype of most tensors of a checkpoint that are not quantized, such as norms."""
    dtypes = [
        w.dtype
        for name, w in weights.items()
        if name.endswith((".weight", ".bias")) and w.dtype in (mx.float32, mx.float16, mx.bfloat16)
    ]
    return max(set(dtypes), key=dtypes.count) if dtypes else mx.bfloat16
