"""Tokens of a split, cached on disk: encoded once, then mapped into memory and read row by row.

The key of a file covers everything that its tokens depend on, so an entry is right or not found;
what is damaged, or is not ours, is encoded again and replaced.
"""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from ..bases.chat_template import reads_clock
from ..bases.tokenizer import with_template
from ..bases.turns import images_of
from ..cache import json_array
from ..config.data import COLUMN_SETTINGS, DataConfig
from .encoding import ENCODING_VERSION, EncodingOptions, Examples, checked_format, encode
from .encoding_parts import EncodingJob, encode_parts, part_count, parts_of
from .formats import Row, RowFormat
from .row_format import BadRows
from .sources import Rows, as_rows
from .token_store import TOKENS, StoredExamples

WORTHWHILE_BYTES = 2 << 20  # of rows: a second or two of encoding
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
    folder = TOKENS.path
    key = None
    if folder is not None and rows.nbytes() >= least_bytes:
        key = cache_key(rows, tokenizer, columns, options, row_format)

    if key is None:
        if images_of(tokenizer) is None:
            advance = None
        return encode(rows, tokenizer, columns, options, row_format, advance), None

    file = TOKENS.arrays_file(key)
    if (stored := _read(key, rows, columns, options, row_format)) is not None:
        return stored, file

    parts = parts_of(rows, folder, key)
    if len(parts) > 1:
        first, token_format = checked_format(rows, columns, row_format)
        job = EncodingJob(rows, tokenizer, columns, options, token_format.name, first.where)
        examples = encode_parts(job, parts, num_proc, advance or (lambda: None))
    else:
        examples = encode(rows, tokenizer, columns, options, row_format)

    if not TOKENS.put(key, _entry(examples)):  # a full or read-only disk must not stop a run
        return examples, None

    for part in parts:
        part.file.unlink(missing_ok=True)
    TOKENS.remove_unused()
    return _read(key, rows, columns, options, row_format) or examples, file


def steps_of(rows: Sequence[Row], tokenizer: Any) -> tuple[int, str]:
    """Return the steps of `encode_cached` for a bar, and what they are."""
    if images_of(tokenizer) is not None:
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
    if images_of(tokenizer) is not None:
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


def _entry(examples: Examples) -> dict[str, np.ndarray]:
    return {
        **examples.items.parts,
        "counts": np.array([examples.cut, examples.dropped], np.int64),
        "bad": json_array(examples.bad.to_json()),
        "fingerprint": np.frombuffer(bytes.fromhex(examples.fingerprint), np.uint8),
    }


def _read(
    key: str,
    rows: Rows,
    columns: DataConfig,
    options: EncodingOptions,
    row_format: RowFormat | None,
) -> Examples | None:
    """Return mapped examples; None without a complete entry of this key."""
    if (parts := TOKENS.get(key)) is None:
        return None

    _, token_format = checked_format(rows, columns, row_format)
    loss_on = token_format.resolve_loss_on(options.loss_on)
    entries = json.loads(parts["bad"].tobytes())
    bad = BadRows.from_json(entries, rows, columns.on_bad_row == "stop")
    cut, dropped = parts["counts"].tolist()
    fingerprint = parts["fingerprint"].tobytes().hex()

    parts = {name: part if name in _MAPPED else np.array(part) for name, part in parts.items()}
    items = StoredExamples(parts, rows.where)
    return Examples(items, token_format.name, loss_on, cut, dropped, bad, fingerprint)
