"""The fingerprint of a base: a hash of every byte of its tensors, cached between processes.

A fingerprint is ``sha256:`` and 64 digits. It is the SHA-256 of a JSON list of ``[name, dtype,
shape, hashes]``, sorted; ``hashes`` are the SHA-256 of the tensor's bytes, 16 MiB each. So it does
not depend on how tensors are spread over files, and threads share the work.

The files beside the weights (config, tokenizer, template) have a hash each: a resumed run needs the
same ones, while a pack on a base with another of them is only worth a note.
"""

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

from ..cache import Cache, key_of
from ..errors import PackError, printable, warn_once
from ..reading import read_header, sha256
from .files import FINGERPRINT_PREFIX, text_files, weight_files

_CACHE = Cache("fingerprints", days=90)
_PIECE_BYTES = 16 << 20  # of a tensor that are hashed as one
_BUFFER_BYTES = 1 << 20
_THREADS = 8
_SETTLED_SECONDS = 3  # a file younger than a clock's step may change again with the same times

FileState = tuple[str, int, int, int, int]  # path, size, mtime_ns, ctime_ns, inode


def fingerprint(path: Path) -> str:
    """Return the fingerprint of a checkpoint folder's tensors.

    What was hashed before is not read again while path, size, times and inode of every file stay.
    Raises PackError if a file is damaged, or changes while it is read.
    """
    files = weight_files(path)
    states = [_state(file) for file in files]
    key = key_of(os.fsencode(path.resolve()).hex())
    entry = _CACHE.get_json(key)
    if entry and entry["files"] == [list(state) for state in states]:
        return entry["fingerprint"]

    began = time.time_ns()
    value = _hash_tensors(files)

    if [_state(file) for file in files] != states:
        raise PackError(
            f"{path}: its weights changed while they were read. Wait until they are written.",
            "unreadable",
        )

    newest = max((time_ns for state in states for time_ns in state[2:4]), default=began)
    if began - newest > _SETTLED_SECONDS * 1e9:
        _CACHE.put_json(key, {"files": states, "fingerprint": value})
        _CACHE.remove_unused()
    return value


def text_hashes(path: Path) -> dict[str, str]:
    """SHA-256 of each file beside the weights that a base's results may depend on."""
    return {f.relative_to(path).as_posix(): _hash_of(_state(f)) for f in text_files(path)}


def changed_texts(path: Path, recorded: Mapping[str, str]) -> list[str]:
    """Names of files beside the weights that are not as recorded."""
    current = text_hashes(path)
    names = sorted({*current, *recorded})
    return [printable(name) for name in names if current.get(name) != recorded.get(name)]


def say_changed(where: str, path: Path, names: Sequence[str]) -> None:
    """Log once that a pack was trained with other files beside the weights."""
    more = " …" if len(names) > 3 else ""
    shown = ", ".join(names[:3]) + more
    warn_once(
        "%s: was trained with another %s than %s has. Results may differ.", where, shown, path
    )


@lru_cache(maxsize=256)
def _hash_of(state: FileState) -> str:
    return sha256(Path(state[0]))


def _state(file: Path) -> FileState:
    """What changes when the bytes of a file do."""
    stat = file.stat()
    return str(file.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


def _hash_tensors(files: list[Path]) -> str:
    tensors: list[list] = []
    pieces: list[tuple[Path, int, int]] = []
    owners: list[int] = []

    for file in files:
        header, start = read_header(file)
        for name, tensor in header.items():
            begin, end = tensor["data_offsets"]
            for offset in range(begin, end, _PIECE_BYTES):
                pieces.append((file, start + offset, min(_PIECE_BYTES, end - offset)))
                owners.append(len(tensors))
            tensors.append([name, tensor["dtype"], tensor["shape"], []])

    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        hashes = pool.map(_hash_piece, pieces)

    for owner, digest in zip(owners, hashes, strict=True):
        tensors[owner][3].append(digest)

    text = json.dumps(sorted(tensors), separators=(",", ":"))
    return FINGERPRINT_PREFIX + hashlib.sha256(text.encode()).hexdigest()


def _hash_piece(piece: tuple[Path, int, int]) -> str:
    """The SHA-256 of bytes of a file, read: a mapped file that is cut short kills the process."""
    file, offset, left = piece
    digest = hashlib.sha256()
    with file.open("rb", buffering=0) as f:
        f.seek(offset)
        while left:
            content = f.read(min(left, _BUFFER_BYTES))
            if not content:
                raise PackError(f"{file}: was cut short while it was read.", "unreadable")
            digest.update(content)
            left -= len(content)
    return digest.hexdigest()
