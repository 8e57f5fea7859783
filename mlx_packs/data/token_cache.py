"""Tokens of a split, cached on disk: encoded once, then mapped into memory and read row by row.

The key of a file covers everything that its tokens depend on, so an entry is right or not found;
what is damaged, or is not ours, is encoded again and replaced.

A large split is encoded part by part, by several processes; a part is some MB of consecutive rows.
Its tokens go to a file of the cache as soon as they are complete, so that a killed run continues
where it was, and parts are joined in their order: the result does not depend on the number of
processes, which resuming and caching rely on. The processes are programs of their own (`work`):
rendering and collecting hold Python's lock, so that threads would wait.
"""

import hashlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from signal import SIG_IGN, SIGINT, Signals, signal
from typing import IO, Any, NamedTuple

import numpy as np

from ..bases.chat_template import reads_clock
from ..bases.tokenizer import with_template
from ..bases.turns import images_of
from ..cache import json_array, read_arrays, write_arrays
from ..config.data import COLUMN_SETTINGS, DataConfig
from ..cores import usable_cores
from ..errors import PackError
from .encoding import ENCODING_VERSION, Encoder, EncodingOptions, Examples, checked_format, encode
from .formats import Row, RowFormat
from .row_format import BadRows
from .sources import Rows, as_rows
from .token_store import TOKENS, StoredExamples

WORTHWHILE_BYTES = 2 << 20  # of rows: a second or two of encoding
_MAPPED = ("tokens", "target")
PART_BYTES = 4 << 20  # of text; a few seconds of encoding
SUFFIX = ".part.npy"
MOST_PROCESSES = 8  # by default; each has about 160 MB
_LEAST_PARTS = 2  # of a process, which takes some seconds to start
# Without the current folder on the path, whose files may be called as modules.
_CODE = (
    f"import sys; sys.path = [*filter(None, sys.path), {str(Path(__file__).parents[2])!r}]; "
    "from mlx_packs.data.token_cache import work; work()"
)
_ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1"}


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
    cover. At most ``num_proc`` processes encode a split of several parts (`encode_parts`), and
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
        encoder_of = partial(Encoder, rows, tokenizer, columns, options, token_format, first.where)
        examples = encode_parts(encoder_of, parts, num_proc, advance or (lambda: None))
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
    bad = BadRows(columns.on_bad_row == "stop", rows.per_row)
    bad.add_json(json.loads(parts["bad"].tobytes()), rows.where)
    cut, dropped = parts["counts"].tolist()
    fingerprint = parts["fingerprint"].tobytes().hex()

    parts = {name: part if name in _MAPPED else np.array(part) for name, part in parts.items()}
    items = StoredExamples(parts, rows.where)
    return Examples(items, token_format.name, loss_on, cut, dropped, bad, fingerprint)


class Part(NamedTuple):
    file: Path
    key: str
    start: int
    stop: int


Encoders = Callable[..., Encoder]  # `Encoder` without ``is_part``, which can be pickled


def encode_part(encoder_of: Encoders, part: Part) -> None:
    """Write the file of a part, unless it has an error."""
    encoder = encoder_of(is_part=True)
    with suppress(PackError, OSError):  # who joins the parts encodes it again, and raises it
        encoder.encode(part.start, part.stop)
        write_arrays(part.file, part.key, encoder.part())


def part_count(rows: Rows) -> int:
    return max(1, min(len(rows), round(rows.nbytes() / PART_BYTES)))


def parts_of(rows: Rows, folder: Path, key: str) -> list[Part]:
    """Return the parts of a split, the same each time; ``key`` is the key of its tokens."""
    count = part_count(rows)
    edges = [len(rows) * i // count for i in range(count + 1)]
    return [
        Part(folder / f"{key}-{i:05d}{SUFFIX}", f"{key} {start}:{stop}", start, stop)
        for i, (start, stop) in enumerate(zip(edges, edges[1:], strict=False))
    ]


def default_processes() -> int:
    cores = usable_cores() if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_PROCESSES)


def process_count(rows: Rows, parts: int, num_proc: int | None) -> int:
    """Return how many processes encode ``parts`` parts; 1 is this process."""
    if not rows.is_in_files():
        return 1
    wanted = default_processes() if num_proc is None else num_proc
    return min(wanted, max(1, parts // _LEAST_PARTS))


def encode_parts(
    encoder_of: Encoders, parts: list[Part], num_proc: int | None, advance: Callable[[], None]
) -> Examples:
    """Return the examples of all parts; a part whose file is missing is encoded.

    ``num_proc`` limits the processes (None: `default_processes`); ``advance`` is called after each
    part. A row that cannot be used, or a process that was killed, is a PackError.
    """
    missing = [part for part in parts if not part.file.exists()]
    encoder = encoder_of()
    count = process_count(encoder.rows, len(missing), num_proc)

    with _encoding(encoder_of, missing, count) as encode_missing:
        for part in parts:
            if part in missing:
                encode_missing(part)

            if (arrays := read_arrays(part.file, part.key)) is not None:
                encoder.add_part(arrays)
            else:  # it has an error, or its file cannot be written or is damaged
                encoder.encode(part.start, part.stop)
            advance()

    return encoder.examples()


@contextmanager
def _encoding(
    encoder_of: Encoders, parts: list[Part], count: int
) -> Iterator[Callable[[Part], object]]:
    """Yield what returns once a part is encoded: here, or by one of ``count`` processes."""
    if count == 1:
        yield partial(encode_part, encoder_of)
        return

    workers: list[_Worker] = []
    try:
        for first in range(count):
            workers.append(_Worker(encoder_of, parts[first::count]))
        yield lambda part: workers[parts.index(part) % count].wait()
    finally:
        for worker in workers:
            worker.end()


class _Worker:
    """A process that encodes parts, one after the other."""

    def __init__(self, encoder_of: Encoders, parts: list[Part]) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile()
        with tempfile.TemporaryFile() as source:
            pickle.dump((encoder_of, parts), source)
            source.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CODE],
                stdin=source,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env={**os.environ, **_ONE_THREAD},
            )

    def wait(self) -> None:
        """Wait until the process has encoded one more part; a PackError if it has ended."""
        assert self._process.stdout is not None
        if self._process.stdout.read(1):
            return

        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        reason = f"by {Signals(-code).name}" if code < 0 else f"with code {code}: {last:.200}"
        raise PackError(
            f"--num-proc: a process that tokenizes ended {reason}. Start again, with a smaller "
            "--num-proc if memory was short; examples that are done are not tokenized again.",
            "interrupted",
        )

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()


def work() -> None:
    """Encode the parts that stdin has with their encoder, and write a byte to stdout after each.

    The process ends with the process that started it, once a part is complete.
    """
    signal(SIGINT, SIG_IGN)  # Ctrl-C is for who started it
    done = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a library prints is no reply
    encoder_of, parts = pickle.load(sys.stdin.buffer)

    for part in parts:
        encode_part(encoder_of, part)
        done.write(b".")
