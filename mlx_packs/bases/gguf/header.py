"""The header of a GGUF file, every count and offset checked before it is used.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import Code, PackError, file_errors
from ...reading import open_regular
from ..readers import GGUF_MAGIC

_MISSING = object()
_VERSIONS = (2, 3)
_MAX_TENSORS = 1 << 17
_MAX_KEYS = 1 << 16
_MAX_AXES = 4
_BOOL = 7
_STRING = 8
_ARRAY = 9
_SCALARS = {  # struct letter by type of a value
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file."""

    name: str  # as llama.cpp calls it
    shape: tuple[int, ...]  # [rows, columns], as numpy and MLX have it
    type: str  # ``Q4_0``, ``F16``
    offset: int  # of its first byte in the file
    nbytes: int  # in the file


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file whose header was checked."""

    path: Path
    metadata: dict[str, Any]  # arrays of numbers are numpy arrays, other arrays are lists
    tensors: dict[str, TensorInfo]  # by name, in the order of the file

    @property
    def architecture(self) -> str:
        """``general.architecture``; empty if there is none."""
        value = self.metadata.get("general.architecture")
        return value if isinstance(value, str) else ""

    @cached_property
    def _bytes(self) -> np.memmap:
        return np.memmap(self.path, np.uint8, "r")

    def data(self, tensor: TensorInfo) -> np.ndarray:
        """The bytes are mapped."""
        return self._bytes[tensor.offset : tensor.offset + tensor.nbytes]

    def fault(self, fault: str, code: Code = "unreadable") -> PackError:
        return file_fault(self.path, fault, code)

    def get(self, key: str, kind: type, default: Any = _MISSING) -> Any:
        """The metadata at a key, where ``%`` is the architecture; without a default it is needed.

        A value of another type is an error that names the key.
        """
        key = key.replace("%", self.architecture)
        value = self.metadata.get(key, _MISSING)
        if value is _MISSING:
            if default is _MISSING:
                raise self.fault(f"has no {key}. Convert the model again.")
            return default

        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)

        is_kind = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        if not is_kind or (kind is float and not np.isfinite(value)):
            shown = f"{type(value).__name__} {value!r:.40}"
            raise self.fault(f"{key} must be {kind.__name__}, but is {shown}.")
        return value

    def size(self, key: str, default: Any = _MISSING) -> Any:
        """A number from 1 to 2^31 - 1 at a key of the metadata."""
        value = self.get(key, int, default)
        if value is not default and not 1 <= value < 2**31:
            key = key.replace("%", self.architecture)
            raise self.fault(f"{key} is {value}. Copy or download it again.")
        return value


def file_fault(path: Path, fault: str, code: Code = "unreadable") -> PackError:
    return PackError(f"{path}: {fault}", code, "model")


def read_gguf(path: Path) -> GgufFile:
    """Raises PackError for a file cut short, damaged, of another version, or in several parts."""
    with file_errors(path):
        file = open_regular(path)

    with file:
        head = file.read(8)
        _check_version(path, head)

        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            try:
                return _Parser(path, view).parse()
            except _Fault as fault:
                text = f"is cut short or damaged ({fault}). Copy or download it again."
                raise file_fault(path, text) from None


def _check_version(path: Path, head: bytes) -> None:
    if len(head) < 8 or head[:4] != GGUF_MAGIC:
        raise file_fault(path, "is not a GGUF file, or is cut short. Copy or download it again.")

    version = int.from_bytes(head[4:], "little")
    if version in _VERSIONS:
        return

    fault = f"is GGUF version {version}, and versions {_VERSIONS[0]} and {_VERSIONS[1]} are read"
    remedy = "Convert the model again with a current llama.cpp."
    if version >= 1 << 24:
        remedy = "Get the little-endian file of the same model."
    elif version > _VERSIONS[-1]:
        remedy = "Upgrade mlx_packs, or get the file in version 3."

    raise file_fault(path, f"{fault}. {remedy}", "unsupported")


class _Fault(Exception):  # noqa: N818
    """The header contradicts itself or the size of the file."""


class _Parser:
    """Reads a header from front to back; every length is checked against the rest of the file."""

    def __init__(self, path: Path, view: mmap.mmap) -> None:
        self.path = path
        self.view = view
        self.at = 8  # behind magic and version

    def parse(self) -> GgufFile:
        tensors, keys = self._unpack("<QQ")
        if tensors > _MAX_TENSORS or keys > _MAX_KEYS:
            raise _Fault(f"it claims {tensors:,} tensors and {keys:,} keys")

        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self._string()
            if key in metadata:
                raise _Fault(f"the key {key[:60]!r} is there twice")
            metadata[key] = self._value(self._unpack("<I")[0], key)

        self._check_not_split(metadata)
        headers = [self._tensor_header() for _ in range(tensors)]
        return GgufFile(self.path, metadata, self._placed(headers, metadata))

    def _check_not_split(self, metadata: dict[str, Any]) -> None:
        count = metadata.get("split.count")
        if isinstance(count, int) and count > 1:
            raise file_fault(
                self.path,
                f"is one of {count} parts. Join them: `llama-gguf-split --merge FIRST.gguf "
                "WHOLE.gguf`.",
                "unsupported",
            )

    def _take(self, count: int) -> int:
        """Move on by some bytes and return where they start."""
        start = self.at
        end = start + count
        if end > len(self.view):
            raise _Fault(f"its header needs {end:,} bytes of {len(self.view):,}")
        self.at = end
        return start

    def _unpack(self, kind: str) -> tuple:
        return struct.unpack_from(kind, self.view, self._take(struct.calcsize(kind)))

    def _string(self) -> str:
        length = self._unpack("<Q")[0]
        start = self._take(length)
        try:
            return self.view[start : start + length].decode()
        except UnicodeDecodeError:
            raise _Fault(f"a text at byte {start:,} is not UTF-8") from None

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            raise _Fault(f"{key[:60]} has the unknown type {kind}")
        if kind == _BOOL:
            return self._unpack("<B")[0] != 0
        return self._unpack(f"<{_SCALARS[kind]}")[0]

    def _array(self, key: str) -> Any:
        kind, count = self._unpack("<IQ")
        if kind == _STRING:
            if count * 8 > len(self.view) - self.at:
                raise _Fault(f"{key[:60]} claims {count:,} texts")
            return [self._string() for _ in range(count)]

        if kind not in _SCALARS:
            raise _Fault(f"{key[:60]} is an array of the unknown type {kind}")

        letter = "B" if kind == _BOOL else _SCALARS[kind]
        dtype = np.dtype(f"<{letter}")
        start = self._take(count * dtype.itemsize)
        values = np.frombuffer(self.view[start : self.at], dtype, count)
        if kind == _BOOL:
            return values.astype(bool)
        return values

    def _tensor_header(self) -> tuple[str, list[int], int, int]:
        """Name, axes (the fastest first), type and offset in the data."""
        name = self._string()
        axes = self._unpack("<I")[0]
        if not 1 <= axes <= _MAX_AXES:
            raise _Fault(f"{name[:60]} has {axes} axes")
        shape = list(self._unpack(f"<{axes}Q"))
        kind, offset = self._unpack("<IQ")
        return name, shape, kind, offset

    def _placed(
        self, headers: list[tuple[str, list[int], int, int]], metadata: dict[str, Any]
    ) -> dict[str, TensorInfo]:
        """The tensors with their places in the file, which are checked."""
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment not in [2**n for n in range(3, 21)]:
            raise _Fault(f"general.alignment is {str(alignment)[:40]}")

        start = -(-self.at // alignment) * alignment
        spans: list[tuple[int, int, str]] = []
        tensors: dict[str, TensorInfo] = {}
        for name, axes, kind, offset in headers:
            if name in tensors:
                raise _Fault(f"the tensor {name[:60]} is there twice")

            type_name, nbytes = self._size(name, axes, kind)

            begin = start + offset
            end = begin + nbytes
            if offset % alignment or end > len(self.view):
                raise _Fault(
                    f"{name[:60]} lies at {begin:,} to {end:,} of {len(self.view):,} bytes"
                )

            spans.append((begin, end, name))
            tensors[name] = TensorInfo(name, tuple(reversed(axes)), type_name, begin, nbytes)

        spans.sort()
        for (_, end, first), (begin, _, second) in zip(spans, spans[1:], strict=False):
            if begin < end:
                raise _Fault(f"{second[:60]} overlaps {first[:60]}")
        return tensors

    def _size(self, name: str, axes: list[int], kind: int) -> tuple[str, int]:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            type_name = GGMLQuantizationType(kind).name
        except ValueError:
            raise file_fault(
                self.path,
                f"{name[:60]} is of type {kind}, which is not known. Upgrade the package gguf, or "
                "get the model in another quantization.",
                "unsupported",
            ) from None

        per_block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        if any(not 1 <= axis < 2**31 for axis in axes) or axes[0] % per_block:
            raise _Fault(f"{name[:60]} has the shape {axes[::-1]} in {type_name}")
        return type_name, prod(axes) // per_block * block_bytes
