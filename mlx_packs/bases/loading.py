"""Load a base: any causal model of mlx-lm, dense or quantized, or quantized while it is read."""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map

from .. import runtime
from ..config.choices import ENCODERS
from ..errors import PackError
from ..nn.nf4 import NF4Embedding, NF4Linear
from ..nn.quantized import NF4, replace_modules
from ..ops.nf4 import BLOCK_SIZES, NF4Weight
from ..runtime import mx
from .bitsandbytes import from_bitsandbytes
from .encoder import Encoder, embedded, is_encoder, load_encoder, tokens_of
from .encoder import load_tokenizer as load_encoder_tokenizer
from .files import (
    TINY,
    check_files,
    fingerprint,
    public_name,
    quantization_name,
    quantized_as,
    resolve_checkpoint,
    stored_quantization,
    text_config,
    weight_files,
)
from .files import missing_shards as missing_shards  # others take these from here
from .files import stored_config as stored_config
from .files import tiny_checkpoint as tiny_checkpoint
from .quantization import QuantizeOptions, is_named, quantize_weights
from .unsupported import unreadable, unreadable_tokenizer
from .weight_formats import FORMATS, format_of, named_format
from .weight_map import Origin, origins


@dataclass
class BaseModel:
    """A frozen checkpoint with its tokenizer; packs know how to be applied to it (`packs.base`).

    ``name`` is what the user called it, ``path`` the folder, ``fingerprint`` a hash of its tensors,
    ``origins`` which tensor of the files each weight of the model is.
    """

    name: str
    path: Path
    model: nn.Module
    tokenizer: object
    config: dict
    fingerprint: str
    quantization: dict = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict, repr=False, compare=False)

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding table."""
        return int(text_config(self.config)["vocab_size"])

    @property
    def is_encoder(self) -> bool:
        """Whether it makes embeddings of sentences, and no next token."""
        return isinstance(self.model, Encoder)

    def encode(self, texts: Sequence[str], batch_size: int = 32) -> np.ndarray:
        """Embeddings of texts by an encoder, with its active pack: float32 [N, D].

        Raises: PackError for a causal base, or what is no text.
        """
        if not self.is_encoder:
            raise PackError(
                f"{self.name}: is a causal {self.config['model_type']}; embeddings are "
                f"made by an encoder ({', '.join(ENCODERS)})."
            )
        if batch_size < 1:
            raise PackError(f"[encode] batch_size must be positive, but got {batch_size}.")
        if isinstance(texts, str):
            raise PackError("[encode] texts must be a list of texts, but got one text.")
        for at, text in enumerate(texts):
            if not isinstance(text, str):
                raise PackError(f"[encode] texts[{at}] must be a text, but is {text!r:.60}.")
        tokens = tokens_of(self.tokenizer, texts, self.model.longest)
        return embedded(self.model, tokens, batch_size)

    @property
    def public_name(self) -> str:
        """The name that leaves this machine in a manifest."""
        return public_name(self.name)

    def summary(self) -> str:
        """One line: architecture, blocks, quantization, size."""
        text = text_config(self.config)
        kind = quantization_name(self.quantization)
        size = sum(f.stat().st_size for f in weight_files(self.path))
        shown = f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
        blocks = text.get("num_hidden_layers", text.get("n_layer", "?"))
        model_type = self.config["model_type"]
        return f"{self.name} · {model_type} · {blocks} blocks · {kind} · {shown}"


Weights = dict[str, mx.array]
_PARTS = ("weight", "absmax", "nested_absmax", "offset")
_AGAIN = "The checkpoint is damaged: get it again."


def load_model_of(
    path: Path, trust_remote_code: bool, pack: Callable[[nn.Module, Weights], Weights]
) -> tuple[nn.Module, dict, dict[str, Origin]]:
    """mlx-lm's loader; ``pack`` gets the model and its lazy weights by the model's names.

    Returns: the model, its config, and which tensor of the files each of its weights is.
    """
    from mlx_lm.utils import _get_classes, load_model

    stored = json.loads((path / "config.json").read_text())
    if is_encoder(path, stored):
        raise PackError(
            f"{path}: is an encoder ({stored['model_type']}) and stays in float32; "
            "this is for causal models."
        )
    if "model_file" in stored and not trust_remote_code:
        raise PackError(f"{path}: brings code of its own; --trust-remote-code runs it.")
    # mlx-lm before 0.32, the last for Python 3.10, has no such argument and always runs the code
    known = "trust_remote_code" in inspect.signature(load_model).parameters
    came_from: dict[str, Origin] = {}

    def classes(config):
        model_class, arguments_class = _get_classes(config)

        def make(arguments):
            model = model_class(arguments)
            to_names_of_model = getattr(model, "sanitize", lambda weights: weights)

            def sanitize(weights):
                own = from_bitsandbytes(dict(weights), str(path))
                weights.clear()  # the caller keeps this one: nothing else may hold a dense weight
                stored = dict(own)
                named = dict(to_names_of_model(own))
                came_from.update(origins(stored, named))
                stored.clear()
                own.clear()
                return pack(model, named)

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
        vars(model).pop("sanitize", None)
        return model, config, came_from
    except (ValueError, KeyError, TypeError, UnboundLocalError) as error:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        raise unreadable(path, config, _reason(error)) from None
    except RuntimeError as error:
        raise PackError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None


def _reason(error: Exception) -> str:
    """An error of another library in one line."""
    if isinstance(error, UnboundLocalError):  # mlx-lm's, of AWQ and GPTQ without packed tensors
        return "none of its tensors is packed"
    text = " ".join(str(error).split())
    return f"there is no {text}" if isinstance(error, KeyError) else text


def load_base_tokenizer(path: Path, config: dict, trust_remote_code: bool) -> object:
    from huggingface_hub.errors import StrictDataclassError  # of a config that transformers refuses
    from mlx_lm.utils import load_tokenizer
    from transformers.utils import logging as transformers_logging

    said = transformers_logging.get_verbosity()
    try:
        if not (path / "tokenizer.json").is_file():  # what it tries then, it says line by line
            transformers_logging.set_verbosity(transformers_logging.CRITICAL)
        tokenizer = load_tokenizer(
            path,
            {"trust_remote_code": trust_remote_code},
            eos_token_ids=config.get("eos_token_id"),
        )
    except (OSError, ValueError, KeyError, TypeError, ImportError, StrictDataclassError) as error:
        raise unreadable_tokenizer(path, _reason(error)) from None
    finally:
        transformers_logging.set_verbosity(said)
    # without its files, transformers makes an empty tokenizer of the kind that the config names
    if not tokenizer.encode("a b", add_special_tokens=False):
        raise unreadable_tokenizer(path, "it knows no token")
    return tokenizer


def _place_nf4(model: nn.Module, weights: Weights, dtype: mx.Dtype, where: Path) -> None:
    """Put an NF4 module wherever the weights are packed; the tensors are loaded into it later."""
    modules = dict(model.named_modules())
    placed = []
    for path in [name.removesuffix(".absmax") for name in weights if name.endswith(".absmax")]:
        module = modules.get(path)
        if not isinstance(module, (nn.Linear, nn.Embedding)):
            kind = "nothing" if module is None else type(module).__name__
            raise PackError(
                f"{where}: {path}.absmax: NF4 is read for linears and embeddings, here is {kind}."
            )
        parts = {part: weights.get(f"{path}.{part}") for part in _PARTS}
        if parts["weight"] is None:
            raise PackError(f"{where}: {path}.weight: is missing beside {path}.absmax. {_AGAIN}")
        block_size = _block_size(parts["weight"], parts["absmax"])
        try:
            packed = NF4Weight(*parts.values(), block_size)
        except ValueError as error:
            raise PackError(
                f"{where}: {path}: packed tensors do not fit: {error} {_AGAIN}"
            ) from None
        for part in _PARTS[1:]:  # the codes stay lazy
            if parts[part] is not None and not mx.isfinite(parts[part]).all().item():
                raise PackError(f"{where}: {path}.{part}: has NaN or infinite values. {_AGAIN}")
        if list(packed.shape) != list(module.weight.shape):
            raise PackError(
                f"{where}: {path}: is packed for {list(packed.shape)}, but the config "
                f"asks for {list(module.weight.shape)}."
            )
        if isinstance(module, nn.Embedding):
            placed.append((path, NF4Embedding(packed, dtype)))
        else:
            placed.append((path, NF4Linear(packed, module.get("bias"), dtype)))
    replace_modules(model, placed)


def _refuse_codes_alone(weights: Weights, where: Path) -> None:
    """Raises: PackError if a weight of an NF4 folder has codes but no absmax."""
    for name, tensor in weights.items():
        path = name.removesuffix(".weight")
        scaled = f"{path}.absmax" in weights or f"{path}.scales" in weights
        if name.endswith(".weight") and tensor.dtype == mx.uint8 and not scaled:
            raise PackError(
                f"{where}: {path}.absmax: is missing beside {name}, which is NF4. {_AGAIN}"
            )


def _block_size(weight: mx.array, absmax: mx.array) -> int:
    """The block size that gives so many absmax; the default if none does."""
    fitting = [b for b in BLOCK_SIZES if -(-2 * weight.size // b) == absmax.size]
    return fitting[0] if len(fitting) == 1 else 64


def stored_as_asked(config: Mapping, quantize: str) -> bool:
    """Whether --quantize asks a checkpoint for the NF4 that it is stored in.

    Raises: PackError if it is quantized and asked to be so otherwise.
    """
    has = stored_quantization(config)
    if quantize == "none" or not has:
        return False
    if FORMATS[quantize].is_stored(has):
        return True
    raise _quantized_already(quantize, quantization_name(has))


def _quantized_already(quantize: str, kind: str) -> PackError:
    return PackError(
        f"--quantize {quantize}: the base is quantized already ({kind}); train on it as it is, or "
        "name the checkpoint that it was made from."
    )


def check_stored_nf4(
    packed: Sequence[tuple[str, bool]], name: str, double_quant: bool, keep: Sequence[str]
) -> None:
    """An NF4 base that is asked to be NF4 stays as it is, if that is what was asked for.

    Args:
        packed: paths of its NF4 modules, and whether each is double-quantized.
    """
    if other := next((path for path, double in packed if double != double_quant), None):
        has = "single" if double_quant else "double"
        raise PackError(
            f"--quantize nf4: {name} is NF4 already, {has}-quantized ({other}); leave "
            "--no-double-quant as the base has it."
        )
    for kept in keep:
        if path := next((path for path, _ in packed if is_named(path, kept)), None):
            raise PackError(
                f"--keep {kept}: {name} is NF4 already, {path} too; take the "
                "checkpoint that it was made from."
            )


def _nf4_quantization(model: nn.Module) -> dict:
    """What config.json would say of a checkpoint that bitsandbytes packed; {} if it did not."""
    module = next((m for m in model.modules() if isinstance(m, NF4)), None)
    if module is None:
        return {}
    return format_of(module).to_config()


def _activation_dtype(config: dict, wanted: str) -> mx.Dtype:
    """What hidden states are computed in: float32 on a CPU, else as asked for or as stored."""
    if runtime.on_cpu():
        return mx.float32
    if wanted != "auto":
        return {"float16": mx.float16, "float32": mx.float32, "bfloat16": mx.bfloat16}[wanted]
    named = str(text_config(config).get("torch_dtype") or text_config(config).get("dtype"))
    return {"float16": mx.float16, "float32": mx.float32}.get(named, mx.bfloat16)


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
    path = resolve_checkpoint(name)
    check_files(path)
    stored = json.loads((path / "config.json").read_text(encoding="utf-8"))
    if is_encoder(path, stored):
        return _load_encoder_base(name, path, stored, quantize, compute_dtype, trust_remote_code)
    as_stored = stored_as_asked(stored, quantize)
    options = None if as_stored else options
    if options and (kind := quantized_as(path, stored)):
        raise _quantized_already(quantize, kind)
    is_nf4 = FORMATS["nf4"].is_stored(stored_quantization(stored))
    dtype = _activation_dtype(stored, compute_dtype)

    def pack(model: nn.Module, weights: Weights) -> Weights:
        if options:
            weights = quantize_weights(model, weights, options)
        if is_nf4:
            _refuse_codes_alone(weights, path)
        _place_nf4(model, weights, dtype, path)
        return weights

    model, config, came_from = load_model_of(path, trust_remote_code, pack)
    if as_stored:
        packed = [(p, m.double_quant) for p, m in model.named_modules() if isinstance(m, NF4)]
        check_stored_nf4(packed, str(name), double_quant, keep)
    quantization = config.get("quantization") or _nf4_quantization(model)
    if options:
        quantization = options.weight_format.to_config() | ({"keep": list(keep)} if keep else {})
    if runtime.on_cpu() or compute_dtype != "auto":
        half = (mx.float16, mx.bfloat16)
        changed = half if runtime.on_cpu() else (*half, mx.float32)
        frozen = {id(v) for m in model.modules() if isinstance(m, NF4) for v in m.values()}
        model.update(
            tree_map(
                lambda a: a.astype(dtype) if a.dtype in changed and id(a) not in frozen else a,
                model.parameters(),
            )
        )
    model.freeze()
    model.eval()
    if not lazy:
        mx.eval(model.parameters())
    tokenizer = load_base_tokenizer(path, config, trust_remote_code)
    found = fingerprint(path)
    return BaseModel(
        str(name), path, model, tokenizer, config, found, dict(quantization), came_from
    )


def _load_encoder_base(
    name: str | Path, path: Path, config: dict, quantize: str, compute_dtype: str, trust: bool
) -> BaseModel:
    """An encoder, in float32 on every device."""
    if quantize != "none":
        raise PackError(
            f"--quantize {quantize}: {name} is an encoder, and those are trained in "
            "float32: packs plan says why."
        )
    if compute_dtype not in ("auto", "float32"):
        raise PackError(
            f"--compute-dtype {compute_dtype}: {name} is an encoder, which computes in float32."
        )
    model = load_encoder(path, config)
    tokenizer = load_encoder_tokenizer(path, config, model.reading.lower_case, trust)
    return BaseModel(str(name), path, model, tokenizer, config, fingerprint(path))


def hold_causal(base: BaseModel, what: str) -> None:
    """Raises: PackError if a base is an encoder, which has no next token."""
    if base.is_encoder:
        raise PackError(
            f"{what}: {base.name} is an encoder ({base.config['model_type']}) and has no next "
            "token; for one there are packs train --task embedding, eval, merge, export, and "
            "base.encode(texts)."
        )


def lazy_base(name: str | Path, trust_remote_code: bool = False) -> BaseModel:
    """A base whose weights are not read, in the dtypes in which they are stored; no tokenizer.

    Raises: PackError as `load_base_model` does.
    """
    path = resolve_checkpoint(name)
    check_files(path)
    stored = json.loads((path / "config.json").read_text(encoding="utf-8"))
    if is_encoder(path, stored):
        model = load_encoder(path, stored, lazy=True)
        return BaseModel(str(name), path, model, None, stored, fingerprint(path))

    def pack(model: nn.Module, weights: Weights) -> Weights:
        if FORMATS["nf4"].is_stored(stored_quantization(stored)):
            _refuse_codes_alone(weights, path)
        _place_nf4(model, weights, _dense_dtype(weights), path)
        return weights

    model, config, came_from = load_model_of(path, trust_remote_code, pack)
    model.freeze()
    model.eval()
    quantization = config.get("quantization") or _nf4_quantization(model)
    found = fingerprint(path)
    return BaseModel(str(name), path, model, None, config, found, dict(quantization), came_from)


def _dense_dtype(weights: Weights) -> mx.Dtype:
    """The dtype of most tensors of a checkpoint that are not packed, such as norms."""
    found = [
        w.dtype
        for name, w in weights.items()
        if name.endswith((".weight", ".bias")) and w.dtype in (mx.float32, mx.float16, mx.bfloat16)
    ]
    return max(set(found), key=found.count) if found else mx.bfloat16
