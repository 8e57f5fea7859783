"""The user's cache: entries that are made once, found by a key, and removed when nobody uses them.

An entry is a file of arrays, a file of another program's format, or a folder. Its key covers
everything that its content depends on, so an entry is right or missing: a damaged one counts as
missing, and is replaced. Processes that write one entry at once each write it atomically.

A file of arrays is one .npy after another, of which the first has the names of the others as JSON,
and at the end the SHA-256 of the key and of all before.
"""

import atexit
import functools
import hashlib
import io
import json
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy

from .errors import PackError
from .files import atomic_folder, cache_folder, replace_file, write_errors
from .filesystem import remove, sweep, temporary

_BLOCK_BYTES = 16 << 20
_HASH_BYTES = 32
_ALIGNMENT = 64  # bytes; numpy pads its headers to as many
_KEY_FILE = ".key"  # in a folder, once it is complete
_JSON = "json"  # the name of an entry's only array if the entry is a JSON value


def key_of(*facts: Any) -> str:
    """Return the key of facts that JSON can represent: 64 digits."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


class Cache:
    """A part of the user's cache.

    Args:
        kind: The name of its folder in ``$MLX_PACKS_CACHE``.
        days: How long an entry is stored that nobody uses.
        is_needed: Whether entries are stored until the process ends if the cache is off.
    """

    def __init__(self, kind: str, days: int, *, is_needed: bool = False) -> None:
        self._kind = kind
        self._days = days
        self._is_needed = is_needed

    @property
    def path(self) -> Path | None:
        """The folder of the entries; None if ``MLX_PACKS_CACHE`` is ``off``."""
        path = cache_folder(self._kind)
        if path is None and self._is_needed:
            return _folder_of_process(self._kind)
        return path

    def make(self) -> Path | None:
        """Create the folder of the entries, for this user only, and return it."""
        if (path := self.path) is not None:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path

    def arrays_file(self, key: str) -> Path | None:
        """Return the file of an entry of arrays, whether it is there or not."""
        path = self.path
        return path and path / f"{key}.npy"

    def get(self, key: str) -> dict[str, np.ndarray] | None:
        """Return the arrays of an entry, mapped into memory; None if it is missing or damaged."""
        if (file := self.arrays_file(key)) is None:
            return None
        if (arrays := read_arrays(file, key)) is not None:
            _touch(file)
        return arrays

    def put(self, key: str, arrays: Mapping[str, np.ndarray]) -> bool:
        """Store the arrays of an entry; return False if the cache is off or cannot be written."""
        if (file := self.arrays_file(key)) is None:
            return False
        try:
            write_arrays(file, key, arrays)
        except (PackError, OSError):
            return False
        return True

    def get_json(self, key: str) -> Any | None:
        """Return the value of an entry that `put_json` stored; None if it is missing or damaged."""
        arrays = self.get(key)
        return arrays and json.loads(arrays[_JSON].tobytes())

    def put_json(self, key: str, value: Any) -> bool:
        return self.put(key, {_JSON: json_array(value)})

    def file(self, name: str, write: Callable[[BinaryIO], object]) -> Path:
        """Return the file ``name``, whose bytes ``write`` writes if it is missing."""
        assert self.path is not None  # it is needed
        file = self.path / name
        if file.is_file():
            _touch(file)
            return file

        with write_errors(self.path):
            self.make()
            self.remove_unused()
            with temporary(file, Path.touch) as partial:
                with partial.open("wb") as f:
                    write(f)
                replace_file(partial, file)
        return file

    def folder(self, name: str, key: str, write: Callable[[Path], object]) -> Path:
        """Return the folder ``name``, which ``write`` fills if it is missing or of another key."""
        assert self.path is not None  # it is needed
        folder = self.path / name
        key_file = folder / _KEY_FILE
        with suppress(OSError, UnicodeDecodeError):
            if key_file.read_text() == key:
                _touch(key_file)
                return folder

        self.remove_unused()
        with atomic_folder(folder, replace=True) as partial:
            write(partial)
            (partial / _KEY_FILE).write_text(key)
        return folder

    def remove_unused(self) -> None:
        """Remove the entries that nobody has used, and what dead processes left."""
        if (path := self.path) is None or not path.is_dir():
            return

        sweep(path)
        oldest = time.time() - self._days * 24 * 3600
        for entry in path.glob("[!.]*"):
            key_file = entry / _KEY_FILE
            with suppress(OSError):  # another process was faster
                # using a folder touches its key; folders of an earlier version have none
                used = key_file if key_file.exists() else entry
                if used.stat().st_mtime < oldest:
                    remove(entry)


def _touch(file: Path) -> None:
    with suppress(OSError):
        os.utime(file)


@functools.cache
def _folder_of_process(kind: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix=f"mlx_packs-{kind}-"))
    owner = os.getpid()

    def remove_folder() -> None:
        if os.getpid() == owner:  # rather than a fork of it
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove_folder)
    return folder


def json_array(value: Any) -> np.ndarray:
    """Return a JSON value as an array of bytes, uint8."""
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def write_arrays(file: Path, key: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays atomically, durably and in blocks; `read_arrays` finds them by the same key."""
    # wide types first, so that each is aligned in the file
    names = sorted(arrays, key=lambda name: -arrays[name].itemsize)
    listed = json.dumps(names).encode()
    listed += b" " * (-len(listed) % _ALIGNMENT)
    digest = hashlib.sha256(key.encode())

    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # entries may be private
    with temporary(file, Path.touch) as partial:
        with partial.open("wb") as f:
            for array in (np.frombuffer(listed, np.uint8), *(arrays[name] for name in names)):
                for block in _npy_blocks(array):
                    f.write(block)
                    digest.update(block)
            f.write(digest.digest())
        replace_file(partial, file)


def read_arrays(file: Path, key: str) -> dict[str, np.ndarray] | None:
    """Return mapped arrays; None without a complete file of this key."""
    try:
        with file.open("rb") as f:
            if not _is_complete(f, key):
                return None
            f.seek(0)
            return {name: _mapped(f) for name in json.loads(_mapped(f).tobytes())}
    except (OSError, ValueError):
        return None


def _npy_blocks(array: np.ndarray) -> Iterator[memoryview]:
    header = io.BytesIO()
    npy.write_array_header_1_0(header, npy.header_data_from_array_1_0(array))
    yield header.getbuffer()

    for block in blocks(array.reshape(-1)):
        yield np.ascontiguousarray(block).data


def _is_complete(f: BinaryIO, key: str) -> bool:
    """Return whether a file ends with the hash of the key and of everything before."""
    content = np.memmap(f, np.uint8, "r")
    digest = hashlib.sha256(key.encode())
    for block in blocks(content[:-_HASH_BYTES]):
        digest.update(block.data)
    return content[-_HASH_BYTES:].tobytes() == digest.digest()


def _mapped(f: BinaryIO) -> np.ndarray:
    npy.read_magic(f)
    shape, _, dtype = npy.read_array_header_1_0(f)
    start = f.tell()
    if 0 in shape:
        return np.empty(shape, dtype)

    array = np.memmap(f, dtype, "r", start, shape)
    f.seek(start + array.nbytes)
    return array


def blocks(part: np.ndarray) -> Iterator[np.ndarray]:
    """Yield blocks of some MB; the pages of a mapped array do not stay in memory."""
    step = max(1, _BLOCK_BYTES // part.itemsize)
    for start in range(0, len(part), step):
        yield part[start : start + step]
        release(part)


def release(part: np.ndarray) -> None:
    """Return the memory of a mapped array to the system."""
    base: object = part
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, mmap.mmap) and hasattr(base, "madvise"):
        base.madvise(mmap.MADV_DONTNEED)
