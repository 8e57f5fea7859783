"""Arrays of encoded examples in a file: safetensors with a hash of their content, mapped when read."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ..errors import PackError
from ..files import replace_file
from ..leftovers import temporary
from ..reading import read_header
from .token_store import blocks

DIGEST = {"digest": ("U8", np.uint8)}  # [32], SHA-256 of the key and all arrays
Dtypes = Mapping[str, tuple[str, type]]  # by name: what safetensors calls it, and the NumPy type


def _digest(key: str, arrays: Mapping[str, np.ndarray], dtypes: Dtypes) -> np.ndarray:
    digest = hashlib.sha256(key.encode())
    for name in dtypes:
        for block in blocks(arrays[name]):
            digest.update(np.ascontiguousarray(block).data)
    return np.frombuffer(digest.digest(), np.uint8)


def write_arrays(file: Path, key: str, arrays: Mapping[str, np.ndarray], dtypes: Dtypes) -> None:
    """Write arrays of one axis as safetensors, atomically and a block at a time.

    ``key`` names the content: `read_arrays` finds it by the same key alone.
    """
    arrays = {**arrays, "digest": _digest(key, arrays, dtypes)}
    stored = {**dtypes, **DIGEST}
    header, end = {}, 0
    order = sorted(stored, key=lambda name: -np.dtype(stored[name][1]).itemsize)  # aligned
    for name in order:
        begin, end = end, end + arrays[name].nbytes
        offsets = [begin, end]
        header[name] = {
            "dtype": stored[name][0],
            "shape": [len(arrays[name])],
            "data_offsets": offsets,
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # rows may be private
    with temporary(file, Path.touch) as partial:
        with partial.open("wb") as f:
            f.write(len(text).to_bytes(8, "little") + text)
            for name in order:
                for block in blocks(arrays[name]):
                    f.write(np.ascontiguousarray(block).data)
        replace_file(partial, file)


def read_arrays(file: Path, key: str, dtypes: Dtypes) -> dict[str, np.ndarray] | None:
    """Return the arrays of a file, mapped; None without a complete file of this key."""
    try:
        header, start = read_header(file)
        arrays = {}
        for name, (stored, dtype) in {**dtypes, **DIGEST}.items():
            tensor = header[name]
            (length,) = tensor["shape"]
            if tensor["dtype"] != stored or start % 8:
                return None
            offset = start + tensor["data_offsets"][0]
            empty = np.empty(0, dtype)
            arrays[name] = np.memmap(file, dtype, "r", offset, (length,)) if length else empty
        digest = arrays.pop("digest")
        return arrays if np.array_equal(_digest(key, arrays, dtypes), digest) else None
    except (PackError, OSError, ValueError, KeyError, TypeError):
        return None
