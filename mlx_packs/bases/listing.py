"""`packs list --bases`: the base models on this disk, by their configs and headers.

No weight is read, and nothing is downloaded or converted.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from ..config.choices import architecture_of
from ..display import size
from ..errors import PackError, file_errors, library_errors
from ..files import is_hub_id
from ..reading import DTYPE_BITS, FLOATS, read_header
from .compressed_tensors import is_compressed
from .files import (
    BITSANDBYTES,
    CONFIG,
    TINY,
    cached_snapshot,
    check_files,
    is_complete,
    read_config,
    resolve_checkpoint,
    stored_quantization,
    tiny_checkpoint,
    weight_files,
)
from .gguf import architectures as gguf
from .gguf.header import read_gguf
from .model_classes import classes_of
from .readers import LM_STUDIO, local_model, ollama_names
from .supported import check_supported, untrainable
from .unsupported import unreadable, unsupported_weights

_KEYS = "name source format architecture bits gb usable why".split()
_NAME_WIDTH = 40  # columns; the other cells of a longer name are on the next line

# A base: its source, the name that --model takes, and where it is, or why it is nowhere.
_Found = tuple[str, str, Path | PackError]


def list_bases() -> list[dict[str, Any]]:
    """Return a mapping for each base model on this disk: bundled, of the Hub's cache, of others.

    ``name`` is what ``--model`` takes, ``source`` the place: bundled, Hub cache, Ollama or LM
    Studio. ``format`` is safetensors or GGUF. ``architecture`` (the model_type), ``bits`` of a
    weight and ``gb``, the 10^9 bytes of its files, are None where they cannot be read. ``usable``
    says whether `packs train` takes it, and ``why`` why not, or what it needs.
    """
    return [_entry(*base) for base in _bases()]


def _bases() -> Iterator[_Found]:
    yield "bundled", TINY, tiny_checkpoint()
    yield from _in_hub_cache()
    for name in ollama_names():
        yield "Ollama", name, _found(local_model, name)
    for folder in sorted(LM_STUDIO.expanduser().glob("*/[!.]*")):
        if folder.is_dir():
            yield from _in_folder("LM Studio", str(folder), folder)


def _in_hub_cache() -> Iterator[_Found]:
    from huggingface_hub import constants

    source = "Hub cache"
    for folder in sorted(Path(constants.HF_HUB_CACHE).glob("models--*")):
        repo = folder.name.removeprefix("models--").replace("--", "/", 1)
        path = _found(_snapshot, repo)
        if isinstance(path, PackError):
            yield source, repo, path
        else:
            name = repo if is_hub_id(repo) else str(path)
            yield from _in_folder(source, name, path)


def _snapshot(repo: str) -> Path:
    """Return the cached files of a Hub id; raise a PackError if some are missing."""
    with file_errors("the Hugging Face cache"):
        path = cached_snapshot(repo)
    if path is None or not (is_complete(path) or _gguf_files(path) or unsupported_weights(path)):
        raise PackError(
            f"only in part in the Hugging Face cache. `hf download {repo}` gets the rest.",
            "not-found",
        )
    return path


def _in_folder(source: str, name: str, folder: Path) -> Iterator[_Found]:
    """Yield the checkpoint that a folder is, or each GGUF file in it."""
    files = _gguf_files(folder)
    if not files:
        yield source, name, folder
    for file in files:
        yield source, str(file), file


def _gguf_files(folder: Path) -> list[Path]:
    """Return the GGUF files of a folder without safetensors; its projectors are no bases."""
    if any(folder.glob("model*.safetensors")):
        return []
    return [file for file in sorted(folder.rglob("*.gguf")) if not file.name.startswith("mmproj")]


def _found(find: Callable[[str], Path], name: str) -> Path | PackError:
    try:
        return find(name)
    except PackError as error:
        return error


def _entry(source: str, name: str, place: Path | PackError) -> dict[str, Any]:
    """Describe a base as far as it can be read; what stops that is its ``why``."""
    entry = {**dict.fromkeys(_KEYS), "name": name, "source": source, "usable": False}
    try:
        if isinstance(place, PackError):
            raise place
        with file_errors(place):
            describe = _describe_checkpoint if place.is_dir() else _describe_gguf
            describe(entry, place)
    except PackError as error:
        entry["why"] = _reason(error, name, place)
    else:
        entry["usable"] = True
    return entry


def _reason(error: PackError, name: str, place: Path | PackError) -> str:
    """Return an error without the name and the place, which the entry has."""
    text = error.message
    for prefix in (f"{place}: ", f"{place}{os.sep}", f"--model {name}: "):
        text = text.removeprefix(prefix)
    return text


def _describe_checkpoint(entry: dict[str, Any], path: Path) -> None:
    files = [file for file in path.rglob("*") if file.is_file()]
    entry["gb"] = _gb(sum(file.stat().st_size for file in files))
    resolve_checkpoint(path)
    config = read_config(path / CONFIG)
    entry.update(format="safetensors", architecture=config["model_type"])

    config = check_files(path)
    entry["bits"] = _bits(path, config)
    check_supported(config, path)
    if "model_file" in config:
        entry["why"] = "includes code. --trust-remote-code runs it."
    elif architecture_of(config["model_type"]) == "decoder":
        _check_class(path, config)


def _check_class(path: Path, config: dict) -> None:
    """Check that mlx-lm or mlx-vlm makes a model of a config, and that it can be trained."""
    with library_errors(partial(unreadable, path, config)):
        arguments = classes_of(config)[1]
        arguments.from_dict(config)
    if reason := untrainable(config["model_type"]):
        raise PackError(f"a {config['model_type']} cannot be trained: {reason}.", "unsupported")


def _describe_gguf(entry: dict[str, Any], path: Path) -> None:
    entry.update(format="GGUF", gb=_gb(path.stat().st_size))
    file = read_gguf(path)
    weights = sum(prod(tensor.shape) for tensor in file.tensors.values())
    if weights:
        stored = sum(tensor.nbytes for tensor in file.tensors.values())
        entry["bits"] = round(8 * stored / weights, 2)

    entry["architecture"] = file.architecture or None
    architecture = gguf.architecture_of(file)
    entry["architecture"] = architecture.model_type
    config = gguf.config_of(file, architecture)
    gguf.names_of(file, architecture, config["num_hidden_layers"])


def _gb(count: int) -> float:
    return round(count / 1e9, 4)


def _bits(path: Path, config: dict) -> int | None:
    """Return the bits of a weight by the config, else by the dtype of most bytes; None if unknown.

    Scales and dense weights of a quantized base are not counted.
    """
    stored = stored_quantization(config)
    if isinstance(stored.get("bits"), int):
        return stored["bits"]
    if is_compressed(config):
        return 4
    if stored.get("quant_method") == BITSANDBYTES:
        return 8 if stored.get("load_in_8bit") else 4

    bits: Counter[str] = Counter()
    for file in weight_files(path):
        for tensor in read_header(file)[0].values():
            dtype = tensor["dtype"]
            bits[dtype] += DTYPE_BITS.get(dtype, 0) * prod(tensor["shape"])
    most = max(bits, key=bits.__getitem__, default="")
    if most in FLOATS or most.startswith("F8"):
        return DTYPE_BITS[most]
    return None


def table(entries: list[dict[str, Any]]) -> list[str]:
    """Return entries of `list_bases` as lines below a heading."""
    rows = [["base", "source", "architecture", "bits", "size", "usable"], *map(_cells, entries)]
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    widths[0] = max(len(row[0]) for row in rows if len(row[0]) <= _NAME_WIDTH)

    lines = []
    for name, source, architecture, bits, gb, usable in rows:
        if len(name) > widths[0]:
            lines.append(name)
            name = ""
        lines.append(
            f"{name:<{widths[0]}}  {source:<{widths[1]}}  {architecture:<{widths[2]}}  "
            f"{bits:>{widths[3]}}  {gb:>{widths[4]}}  {usable}"
        )
    return lines


def _cells(entry: dict[str, Any]) -> list[str]:
    bits = "-"
    if entry["bits"] is not None:
        bits = f"{entry['bits']:.3g}"
    gb = "-"
    if entry["gb"] is not None:
        gb = size(1e9 * entry["gb"])

    usable = "yes" if entry["usable"] else "no"
    if entry["why"]:
        usable += f": {entry['why']}"
    return [entry["name"], entry["source"], entry["architecture"] or "-", bits, gb, usable]
