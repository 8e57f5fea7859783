"""Arrays of encoded examples in a file, mapped when read: one .npy after another, and their hash."""

import hashlib
import io
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.lib import format as npy

from ..files import replace_file
from ..leftovers import temporary
from .token_store import BLOCK_BYTES, blocks

_HASH_BYTES = 32  # at the end, SHA-256 of the key and all before
Dtypes = Mapping[str, type]  # by the name of an array, in the order of a file


def write_arrays(file: Path, key: str, arrays: Mapping[str, np.ndarray], dtypes: Dtypes) -> None:
    """Write arrays of one axis to a file, atomically and a block at a time.

    ``key`` names the content: `read_arrays` finds it only by the same key.
    """
    digest = hashlib.sha256(key.encode())
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # rows may be private
    with temporary(file, Path.touch) as partial:
        with partial.open("wb") as f:
            for name in dtypes:
                for block in _npy_blocks(arrays[name]):
                    f.write(block)
                    digest.update(block)
            f.write(digest.digest())
        replace_file(partial, file)


def read_arrays(file: Path, key: str, dtypes: Dtypes) -> dict[str, np.ndarray] | None:
    """Return the arrays of a file, mapped; None without a complete file of this key."""
    try:
        with file.open("rb") as f:
            if not _is_complete(f, key):
                return None

            f.seek(0)
            return {name: _mapped(f, dtype) for name, dtype in dtypes.items()}
    except (OSError, ValueError):
        return None


def _npy_blocks(array: np.ndarray) -> Iterator[memoryview]:
    """Yield the bytes of an array as .npy, its header first."""
    header = io.BytesIO()
    npy.write_array_header_1_0(header, npy.header_data_from_array_1_0(array))
    yield header.getbuffer()
    for block in blocks(array):
        yield np.ascontiguousarray(block).data


def _is_complete(f: BinaryIO, key: str) -> bool:
    """Return whether a file ends with the hash of the key and of all before."""
    digest = hashlib.sha256(key.encode())
    left = os.fstat(f.fileno()).st_size - _HASH_BYTES
    while left > 0 and (block := f.read(min(left, BLOCK_BYTES))):
        digest.update(block)
        left -= len(block)
    return f.read(_HASH_BYTES) == digest.digest()


def _mapped(f: BinaryIO, dtype: type) -> np.ndarray:
    """Return the next array of a file, mapped."""
    npy.read_magic(f)
    (length,), _, stored = npy.read_array_header_1_0(f)
    if stored != dtype:
        raise ValueError(f"must be {np.dtype(dtype)}, but is {stored}")

    start = f.tell()
    array = np.memmap(f, dtype, "r", start, (length,)) if length else np.empty(0, dtype)
    f.seek(start + array.nbytes)
    return array
