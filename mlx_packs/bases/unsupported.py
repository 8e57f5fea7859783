"""Checkpoints and tokenizers of other backends: known by their files, with what works instead."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from ..config.choices import WEIGHT_MODES
from ..errors import PackError, pip_install

INSTEAD = (
    "Use the checkpoint that it was made from, with --quantize nf4 (or affine4), or one in MLX's "
    "4 bits (mlx-community/…)."
)

# `quant_method` of a config.json that mlx-lm or this program reads, at least in part.
_READ = "bitsandbytes awq gptq mxfp4 mxfp8 fp8 compressed-tensors modelopt bitnet".split()

_CLASSIFIER = "ForSequenceClassification"
_PICKLED = (
    "pickled weights of PyTorch, which are never opened",
    "Use the safetensors of the same model, or write them where PyTorch is: "
    "model.save_pretrained(folder, safe_serialization=True).",
)
# Files with weights in another format: pattern, description, alternative.
_WEIGHTS = (
    (
        "consolidated*.safetensors",
        "weights in Mistral's own layout, which is not read",
        "Use the same model's folder with model*.safetensors.",
    ),
    ("*.bin", *_PICKLED),
    ("*.pt*", *_PICKLED),
    (
        "*.npz",
        "weights of an old MLX, which are not read",
        "Convert the original again: `mlx_lm.convert --hf-path …`.",
    ),
    ("*.onnx", "ONNX, which is not read", INSTEAD),
    ("*.engine", "an engine of TensorRT, which is not read", INSTEAD),
)
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")


def unsupported_weights(path: Path) -> str:
    """The format of a folder without model*.safetensors and the alternative, or nothing."""
    if (path / "pack.json").is_file():
        return " It is a pack: give it as PACK, and its base with --model."
    if (path / "adapter_config.json").is_file():
        return f" It is an adapter, no base: `packs import {path} --out PACK`."
    if files := sorted(path.glob("*.gguf")):
        return f" Name the GGUF file itself: --model {files[0]}."
    for pattern, kind, works in _WEIGHTS:
        if files := sorted(path.glob(pattern)):
            return f" {files[0].name} is {kind}. {works}"
    return ""


def unsupported_file(path: Path) -> str:
    for pattern, kind, works in _WEIGHTS:
        if path.match(pattern):
            return f" It is {kind}. {works}"
    return ""


def check_method(path: Path, config: Mapping) -> None:
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        method = (part.get("quantization_config") or {}).get("quant_method")
        if method is not None and not part.get("quantization") and method not in _READ:
            raise PackError(
                f"{path}: is quantized by {method}, which MLX does not read. {INSTEAD}",
                "unsupported",
            )

        modes = [*WEIGHT_MODES, "mxfp8"]  # which is read, and not written
        mode = (part.get("quantization") or {}).get("mode", "affine")
        if mode not in modes:
            raise PackError(
                f"{path}: config.json says that it is quantized in mode {mode}, which is not read. "
                f"There are {', '.join(modes)}.",
                "unsupported",
            )


def unreadable(path: Path, config: Mapping, reason: str) -> PackError:
    method = (config.get("quantization_config") or {}).get("quant_method")
    if method is not None and not config.get("quantization"):
        return PackError(
            f"{path}: is quantized by {method} in a way that mlx-lm does not read "
            f"({reason}). {INSTEAD}",
            "unsupported",
        )

    if "not supported" in reason:
        more = ""
        if find_spec("mlx_vlm") is None:
            more = f" mlx-vlm may have it: `{pip_install('vision')}`."
        return PackError(
            f"{path}: {reason}. docs/families.md lists the architectures that train.{more}",
            "unsupported",
        )

    if any(str(name).endswith(_CLASSIFIER) for name in config.get("architectures") or ()):
        return PackError(
            f"{path}: has the head of a transformers' {_CLASSIFIER} in the place of an LM head, "
            "which is not read. Name the base that it was made from.",
            "unsupported",
        )

    return PackError(f"{path}: tensors and config.json do not fit: {reason}.", "unreadable")


def unreadable_tokenizer(path: Path, reason: str) -> PackError:
    names = [name for name in _TOKENIZERS if (path / name).is_file()]
    names += sorted(file.name for file in path.glob("*.tiktoken"))
    where = f"{path}: the tokenizer cannot be loaded"

    if not names:
        return PackError(
            f"{where}: there is no tokenizer.json. Copy it and tokenizer_config.json from the "
            "model that the weights are of.",
            "not-found",
        )

    if "tokenizer.json" in names:
        return PackError(
            f"{where}: {reason}. Get tokenizer.json and config.json again.", "unreadable"
        )

    return PackError(
        f"{where}: there is only {', '.join(names)}, of which transformers makes no tokenizer "
        f"here ({reason}). A tokenizer.json works: "
        "AutoTokenizer.from_pretrained(…).save_pretrained(…) writes one where it loads.",
        "unsupported",
    )
