"""Encoded examples, one after the other in two arrays; large ones are files mapped into memory.

A file that stays has one .npy after another, and their hash.
"""

import hashlib
import io
import mmap
import tempfile
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
from numpy.lib import format as npy

from ..bases.tokenizer import readable_text
from ..errors import PackError
from ..files import cache_folder, replace_file
from ..leftovers import temporary

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper


_IN_MEMORY = 4 << 20  # bytes that are no file yet
_BLOCK_BYTES = 16 << 20
_HASH_BYTES = 32  # at the end of a file, SHA-256 of the key and all before
# After so many reads the pages of mapped arrays are released: each may load 64 KiB or more.
_READS = 512
# What a split is encoded to, in the order of a file: wide types first.
DTYPES = {
    "ends": np.int64,  # [N], where each example ends
    "rows": np.int64,  # [N], which of the rows it is
    "tokens": np.int32,  # [sum of lengths]
    "target_counts": np.int32,  # [N], targets of each example
    "target": np.bool_,  # [sum of lengths], True where the token is to be predicted
}

Dtypes = Mapping[str, type]  # by the name of an array, in the order of a file


@dataclass(frozen=True)
class Example:
    """Tokens of one row, or of a piece of it, and which of them are targets."""

    tokens: np.ndarray  # int32 [L]
    # bool [L], True where the token is to be predicted; of merged examples int32 [L], by how many
    target: np.ndarray
    where: str  # the row that messages name


class StoredExamples(Sequence):
    """Examples that are built on access from the arrays of `DTYPES`."""

    def __init__(self, parts: Mapping[str, np.ndarray], where: Callable[[int], str]) -> None:
        self.parts = parts
        self._where = where
        self._tokens = np.asarray(parts["tokens"])
        self._target = np.asarray(parts["target"])
        self._edges = np.concatenate([[0], parts["ends"]])
        self._rows = parts["rows"]
        self._reads = 0

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> Example:
        i = range(len(self))[i]
        self._reads += 1

        if self._reads % _READS == 0:
            release(self._tokens)
            release(self._target)

        here = slice(self._edges[i], self._edges[i + 1])
        return Example(self._tokens[here], self._target[here], self._where(int(self._rows[i])))

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each example, int64 [N]."""
        return np.diff(self._edges)


class JoinedExamples(Sequence):
    """Several sequences of examples as one, without a copy."""

    def __init__(self, parts: list[Sequence[Example]]) -> None:
        self.parts = parts
        self.edges = np.cumsum([0, *map(len, parts)])

    def __len__(self) -> int:
        return int(self.edges[-1])

    def __getitem__(self, i: int) -> Example:
        i = range(len(self))[i]
        part = int(np.searchsorted(self.edges, i, "right")) - 1
        return self.parts[part][i - int(self.edges[part])]


class TokenStore:
    """Collects examples; more than a few MB of them go to files without a name."""

    def __init__(self) -> None:
        self._tokens = ByteFile()
        self._target = ByteFile()
        self._ends = array("q")
        self._rows = array("q")
        self._counts = array("i")
        self._end = 0

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, row: int, tokens: np.ndarray, target: np.ndarray) -> None:
        """``tokens`` are int32 [L], ``target`` bool [L]."""
        self._tokens.write(tokens)
        self._target.write(target)
        self._end += len(tokens)
        self._ends.append(self._end)
        self._rows.append(row)
        self._counts.append(np.count_nonzero(target))

    def extend(self, arrays: Mapping[str, np.ndarray]) -> None:
        for name, file in (("tokens", self._tokens), ("target", self._target)):
            for block in blocks(arrays[name]):
                file.write(block)

        self._ends.frombytes((arrays["ends"] + self._end).tobytes())
        self._rows.frombytes(arrays["rows"].tobytes())
        self._counts.frombytes(arrays["target_counts"].tobytes())
        self._end += len(arrays["tokens"])

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays of `DTYPES`."""
        return {
            "ends": np.frombuffer(self._ends, np.int64),
            "rows": np.frombuffer(self._rows, np.int64),
            "tokens": self._tokens.mapped(np.int32),
            "target_counts": np.frombuffer(self._counts, np.int32),
            "target": self._target.mapped(np.bool_),
        }

    def examples(self, where: Callable[[int], str]) -> StoredExamples:
        return StoredExamples(self.arrays(), where)


class ByteFile:
    """Bytes that are appended: in memory while they are few, then in a file without a name."""

    def __init__(self) -> None:
        self._file = io.BytesIO()
        self._in_memory = True

    def write(self, data: np.ndarray) -> None:
        try:
            if self._in_memory and self._file.tell() + data.nbytes > _IN_MEMORY:
                begun = self._file
                self._file = tempfile.TemporaryFile(dir=_token_folder())
                self._in_memory = False
                self._file.write(begun.getbuffer())
            self._file.write(data)
        except OSError as error:
            raise _no_room(error) from None

    def mapped(self, dtype: type) -> np.ndarray:
        """Return the bytes as an array, mapped if they are in a file."""
        if self._in_memory:
            data = self._file.getvalue()
            return np.frombuffer(data, dtype) if data else np.empty(0, dtype)

        try:
            self._file.flush()
        except OSError as error:
            raise _no_room(error) from None
        return np.memmap(self._file, dtype, "r")  # the mapping outlives the file's handle


def _token_folder() -> Path | None:
    """None is the system's temporary folder."""
    folder = cache_folder("tokens")
    try:
        if folder is not None:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # rows may be private
    except OSError:
        return None
    return folder


def _no_room(error: OSError) -> PackError:
    folder = _token_folder() or tempfile.gettempdir()
    return PackError(
        f"{folder}: the tokens of the examples cannot be written ({error.strerror}). Make room, or "
        "set MLX_PACKS_CACHE to a folder on another disk.",
        "unwritable",
    )


def write_arrays(file: Path, key: str, arrays: Mapping[str, np.ndarray], dtypes: Dtypes) -> None:
    """Write arrays of one axis atomically; `read_arrays` only finds them by the same ``key``."""
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
    """Return mapped arrays; None without a complete file of this key."""
    try:
        with file.open("rb") as f:
            if not _is_complete(f, key):
                return None

            f.seek(0)
            return {name: _mapped(f, dtype) for name, dtype in dtypes.items()}
    except (OSError, ValueError):
        return None


def _npy_blocks(array: np.ndarray) -> Iterator[memoryview]:
    header = io.BytesIO()
    npy.write_array_header_1_0(header, npy.header_data_from_array_1_0(array))
    yield header.getbuffer()

    for block in blocks(array):
        yield np.ascontiguousarray(block).data


def _is_complete(f: BinaryIO, key: str) -> bool:
    """Whether a file ends with the hash of the key and of everything before."""
    content = np.memmap(f, np.uint8, "r")
    digest = hashlib.sha256(key.encode())
    for block in blocks(content[:-_HASH_BYTES]):
        digest.update(block.data)
    return content[-_HASH_BYTES:].tobytes() == digest.digest()


def _mapped(f: BinaryIO, dtype: type) -> np.ndarray:
    npy.read_magic(f)
    (length,), _, stored = npy.read_array_header_1_0(f)
    if stored != dtype:
        raise ValueError(f"must be {np.dtype(dtype)}, but is {stored}")

    start = f.tell()
    array = np.memmap(f, dtype, "r", start, (length,)) if length else np.empty(0, dtype)
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


def masked(example: Example, tokenizer: "TokenizerWrapper") -> dict:
    """Split an example into spans of text that are targets or not.

    The result has ``where`` (its row), ``learned`` and ``total`` (numbers of tokens), and
    ``spans``, each with ``text`` and ``learned``.
    """
    target = example.target
    total = len(example.tokens)
    edges = [0, *(i for i in range(1, total) if target[i] != target[i - 1]), total]

    spans = [
        {
            "text": readable_text(tokenizer, example.tokens[start:end].tolist()),
            "learned": bool(target[start]),
        }
        for start, end in zip(edges, edges[1:], strict=False)
    ]

    return {"where": example.where, "learned": int(target.sum()), "total": total, "spans": spans}
