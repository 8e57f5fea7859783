"""Tokens of a split, cached on disk: encoded once, then mapped into memory and read row by row.

The key of a file covers everything that its tokens depend on, so an entry is right or not found;
what is damaged, or is not ours, is encoded again and replaced.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from ..bases.chat_template import reads_clock
from ..bases.templated import with_template
from ..bases.turns import takes_images
from ..config.data import COLUMN_SETTINGS, DataConfig
from ..errors import PackError
from ..files import cache_folder, remove_unused
from .bad_rows import BadRows
from .encoding import ENCODING_VERSION, EncodingOptions, Examples, checked_format, encode
from .encoding_parts import EncodingJob, encode_parts, part_count, parts_of
from .formats import Row, RowFormat
from .sources import Rows, as_rows
from .token_store import DTYPES, StoredExamples, read_arrays, write_arrays

WORTHWHILE_BYTES = 2 << 20  # of rows: a second or two of encoding
_DAYS = 30  # after which an unused file is removed
_DTYPES = {
    **DTYPES,
    "counts": np.int64,  # cut, dropped
    "bad": np.uint8,  # `BadRows.to_json`
    "fingerprint": np.uint8,  # [32], of the rows
}
_MAPPED = ("tokens", "target")


def encode_cached(
    rows: Sequence[Row],
    tokenizer: Any,
    columns: DataConfig,
    options: EncodingOptions,
    least_bytes: int = WORTHWHILE_BYTES,
    row_format: RowFormat | None = None,
    num_proc: int | None = None,
    advance: Callable[[], None] | None = None,
) -> tuple[Examples, Path | None]:
    """Return the result of `encode`, cached if possible, and its file, or None without one.

    Splits of less than ``least_bytes`` are encoded each time, and so is a split that no key can
    cover. At most ``num_proc`` processes encode a split of several parts (`encoding_parts`), and
    ``advance`` is called after each part, or after each row if the base takes images: `steps_of`.
    """
    rows = as_rows(rows)
    folder = cache_folder("tokens")
    key = None
    if folder is not None and rows.nbytes() >= least_bytes:
        key = cache_key(rows, tokenizer, columns, options, row_format)

    if key is None:
        if not takes_images(tokenizer):
            advance = None
        return encode(rows, tokenizer, columns, options, row_format, advance), None

    file = folder / f"{key}.npy"
    if (stored := _read(file, key, rows, columns, options, row_format)) is not None:
        os.utime(file)
        return stored, file

    parts = parts_of(rows, folder, key)
    if len(parts) > 1:
        first, token_format = checked_format(rows, columns, row_format)
        job = EncodingJob(rows, tokenizer, columns, options, token_format.name, first.where)
        examples = encode_parts(job, parts, num_proc, advance or (lambda: None))
    else:
        examples = encode(rows, tokenizer, columns, options, row_format)

    try:
        _write(file, key, examples)
    except (PackError, OSError):  # a full or read-only disk must not stop a run
        return examples, None

    for part in parts:
        part.file.unlink(missing_ok=True)
    for kind in ("*.npy", "*.safetensors"):  # and those of earlier versions
        remove_unused(folder, kind, _DAYS)
    return _read(file, key, rows, columns, options, row_format) or examples, file


def steps_of(rows: Sequence[Row], tokenizer: Any) -> tuple[int, str]:
    """Return the steps of `encode_cached` for a bar, and what they are."""
    if takes_images(tokenizer):
        return len(rows), "examples"
    return part_count(as_rows(rows)), "parts"


def cache_key(
    rows: Sequence[Row],
    tokenizer: Any,
    columns: DataConfig,
    options: EncodingOptions,
    row_format: RowFormat | None = None,
) -> str | None:
    """Hash all that the tokens depend on; None if a part of it cannot be seen."""
    tokenizer = with_template(tokenizer, columns.chat_template)
    plain = tokenizer._tokenizer
    backend = getattr(plain, "backend_tokenizer", None)
    if backend is None or not type(plain).__module__.startswith("transformers."):
        return None  # a slow tokenizer, or one with its own code
    if takes_images(tokenizer):
        return None  # tokens of images are numbers of this process

    today = columns.template_date
    if not today and reads_clock(tokenizer):
        today = time.strftime("%Y-%m-%d")

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
        "today": today,
        "columns": [getattr(columns, name) for name in COLUMN_SETTINGS],
        "template_kwargs": columns.template_kwargs,
        "options": asdict(options),
        "format": row_format and row_format.name,
    }

    if (content := as_rows(rows).content_key()) is None:
        return None

    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode() + content).hexdigest()


def _write(file: Path, key: str, examples: Examples) -> None:
    bad = json.dumps(examples.bad.to_json()).encode()
    arrays = {
        **examples.items.parts,
        "counts": np.array([examples.cut, examples.dropped], np.int64),
        "bad": np.frombuffer(bad, np.uint8),
        "fingerprint": np.frombuffer(bytes.fromhex(examples.fingerprint), np.uint8),
    }
    write_arrays(file, key, arrays, _DTYPES)


def _read(
    file: Path,
    key: str,
    rows: Rows,
    columns: DataConfig,
    options: EncodingOptions,
    row_format: RowFormat | None,
) -> Examples | None:
    """Return mapped examples; None without a complete file of this key."""
    if not file.exists():
        return None

    _, token_format = checked_format(rows, columns, row_format)
    loss_on = token_format.resolve_loss_on(options.loss_on)

    if (parts := read_arrays(file, key, _DTYPES)) is None:
        return None

    try:
        entries = json.loads(parts["bad"].tobytes())
    except ValueError:
        return None

    bad = BadRows.from_json(entries, rows, columns.on_bad_row == "stop")
    cut, dropped = parts["counts"].tolist()
    fingerprint = parts["fingerprint"].tobytes().hex()

    parts = {name: part if name in _MAPPED else np.array(part) for name, part in parts.items()}
    items = StoredExamples(parts, rows.places())
    return Examples.stored(items, token_format.name, loss_on, cut, dropped, bad, fingerprint)
