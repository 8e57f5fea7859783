"""Tokens of a split kept on disk: encoded once, then mapped into memory and read row by row.

The key of a file covers everything that its tokens depend on, so an entry is right or not found;
what is damaged, or is not ours, is encoded again and replaced.
"""

import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from ..config.schema import COLUMN_SETTINGS, DataConfig
from ..errors import PackError
from ..files import cache_folder, remove_unused, write_tensors
from ..reading import read_header
from ..runtime import mx
from .encoding import ENCODING_VERSION, EncodingOptions, Example, Examples, encode, token_format
from .formats import Row

WORTHWHILE_BYTES = 2 << 20  # of rows: a second or two of encoding
_DAYS = 30  # that an unused file is kept
_DTYPES = {
    "ends": ("I64", np.int64),  # [R], where each example ends
    "rows": ("I64", np.int64),  # [R], which of the given rows it is
    "counts": ("I64", np.int64),  # cut, dropped
    "tokens": ("I32", np.int32),  # [sum of lengths]
    "target": ("BOOL", np.bool_),  # the same
    "digest": ("U8", np.uint8),  # [32], SHA-256 of the key and all of the above
}


class StoredExamples(Sequence):
    """Examples that lie one behind the other in a file; each is made when it is read."""

    def __init__(self, parts: dict[str, np.ndarray], places: list[str]) -> None:
        self.tokens, self.target = np.asarray(parts["tokens"]), np.asarray(parts["target"])
        self.edges = [0, *parts["ends"].tolist()]
        self.places = [places[i] for i in parts["rows"]]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, i: int) -> Example:
        i = range(len(self))[i]
        here = slice(self.edges[i], self.edges[i + 1])
        return Example(self.tokens[here], self.target[here], self.places[i])


def encode_cached(
    rows: list[Row],
    tokenizer: Any,
    columns: DataConfig,
    options: EncodingOptions,
    least_bytes: int = WORTHWHILE_BYTES,
) -> tuple[Examples, Path | None]:
    """Return `encoding.encode`, or what it gave for the same before; and the file, if there is one.

    Splits of less than ``least_bytes`` are encoded each time, and so is what the key cannot cover.
    """
    folder, key = cache_folder("tokens"), None
    if folder is not None and _estimated_bytes(rows) >= least_bytes:
        key = cache_key(rows, tokenizer, columns, options)
    if key is None:
        return encode(rows, tokenizer, columns, options), None
    file = folder / f"{key}.safetensors"
    if (stored := _read(file, key, rows, columns, options)) is not None:
        os.utime(file)
        return stored, file
    examples = encode(rows, tokenizer, columns, options)
    try:
        _write(file, key, rows, examples)
    except (PackError, OSError):  # a full or read-only disk must not stop a run
        return examples, None
    remove_unused(folder, "*.safetensors", _DAYS)
    return _read(file, key, rows, columns, options) or examples, file


def _estimated_bytes(rows: list[Row]) -> int:
    """Return the bytes of all rows, from a hundred of them."""
    sample = rows[:: max(1, len(rows) // 100)]
    return sum(len(str(row.value)) for row in sample) * len(rows) // max(1, len(sample))


def cache_key(
    rows: list[Row], tokenizer: Any, columns: DataConfig, options: EncodingOptions
) -> str | None:
    """Return a hash of all that the tokens depend on; None where something of it cannot be seen."""
    plain = tokenizer._tokenizer
    backend = getattr(plain, "backend_tokenizer", None)
    if backend is None or not type(plain).__module__.startswith("transformers."):
        return None  # a slow tokenizer, or one that brings its own code
    template = str(plain.chat_template)
    special = getattr(tokenizer, "_chat_template", None)
    facts = {
        "encoding": ENCODING_VERSION,
        "versions": [version(name) for name in ("mlx-lm", "transformers", "tokenizers")],
        "class": type(plain).__qualname__,
        "tokenizer": hashlib.sha256(backend.to_str().encode()).hexdigest(),
        "special": [plain.special_tokens_map, sorted(plain.all_special_ids)],
        "ends": [tokenizer.eos_token_id, sorted(tokenizer.eos_token_ids)],
        "template": [template, getattr(special, "__module__", None)],
        "today": time.strftime("%Y-%m-%d") if "strftime_now" in template else None,
        "columns": [getattr(columns, name) for name in COLUMN_SETTINGS],
        "options": asdict(options),
    }
    digest = hashlib.sha256()
    try:
        digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
        for row in rows:  # as they are: the order of keys shows in what a template renders
            line = json.dumps(row.value, ensure_ascii=False)
            digest.update(line.encode(errors="surrogatepass") + b"\n")
    except (TypeError, ValueError):  # a value that JSON does not have
        return None
    return digest.hexdigest()


def _digest(key: str, parts: dict[str, np.ndarray]) -> np.ndarray:
    digest = hashlib.sha256(key.encode())
    for name in _DTYPES:
        if name != "digest":
            digest.update(np.ascontiguousarray(parts[name]).data)
    return np.frombuffer(digest.digest(), np.uint8)


def _write(file: Path, key: str, rows: list[Row], examples: Examples) -> None:
    index = {row.where: i for i, row in enumerate(rows)}
    parts = {
        "ends": np.cumsum(examples.lengths, dtype=np.int64),
        "rows": np.array([index[e.where] for e in examples.items], np.int64),
        "counts": np.array([examples.cut, examples.dropped], np.int64),
        "tokens": np.concatenate([e.tokens for e in examples.items]),
        "target": np.concatenate([e.target for e in examples.items]),
    }
    parts["digest"] = _digest(key, parts)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # rows may be private
    tensors = {name: mx.array(part) for name, part in parts.items()}
    write_tensors(file, tensors, tensors.items())


def _read(
    file: Path, key: str, rows: list[Row], columns: DataConfig, options: EncodingOptions
) -> Examples | None:
    """Return the examples of a file, mapped; None without a complete file of this key."""
    row_format = token_format(rows[0], columns)
    loss_on = row_format.resolve_loss_on(options.loss_on)
    try:
        header, start = read_header(file)
        parts = {}
        for name, (stored, dtype) in _DTYPES.items():
            if (tensor := header[name])["dtype"] == stored:
                offset, shape = start + tensor["data_offsets"][0], tuple(tensor["shape"])
                parts[name] = np.memmap(file, dtype, "r", offset, shape)
        if not np.array_equal(_digest(key, parts), parts["digest"]):
            return None
    except (PackError, OSError, ValueError, KeyError, TypeError):
        return None
    cut, dropped = parts["counts"].tolist()
    items = StoredExamples(parts, [row.where for row in rows])
    return Examples(items, row_format.name, loss_on, cut, dropped)
