"""Embeddings and heads in files: the checkpoint's, and pieces of a head."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from ..nn.surgery import block_prefixes
from ..nn.tables_on_disk import EMBEDDINGS, KINDS, put_table_on_disk
from ..reading import read_header
from ..runtime import mx
from ..tensors import save_tensors
from .blocks import FileState, empty, lazy_read, open_unchanged, state_of

PIECE_ROWS = 1024  # of a file of a head: a slice of the vocabulary reads some files


@dataclass(frozen=True)
class TableModule:
    """An embedding or a head of a model."""

    module: nn.Module
    is_head: bool  # whether losses read it in slices

    def put_on_disk(
        self,
        found: Mapping[str, tuple[Path, str]],
        pieces: Sequence[Path],
        count: Callable[[int], None],
    ) -> None:
        """Let the module read its rows from files, and be hollow.

        ``found`` has the file of each array, and its name there; all else is as of `StoredTable`.
        """
        arrays = dict(tree_flatten(self.module.parameters()))
        stored = {n: StoredArray.find(*found[n], array.dtype) for n, array in arrays.items()}
        for array in arrays.values():
            empty(array)
        put_table_on_disk(self.module, StoredTable(stored, pieces, count))


def tables_of(model: nn.Module) -> dict[str, TableModule]:
    """Return the embeddings and the head of a model that can be on disk, by their paths."""
    blocks = tuple(f"{prefix}." for prefix in block_prefixes(model))
    modules = {
        path: module
        for path, module in model.named_modules()
        if type(module) in KINDS and not path.startswith(blocks) and "bias" not in module
    }
    embeddings = {path: module for path, module in modules.items() if type(module) in EMBEDDINGS}
    rows = {len(module.weight) for module in embeddings.values()}
    heads = {p: m for p, m in modules.items() if p not in embeddings and len(m.weight) in rows}

    is_tied = not heads
    tables = {path: TableModule(module, is_tied) for path, module in embeddings.items()}
    return tables | {path: TableModule(module, True) for path, module in heads.items()}


_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "uint16", "U32": "uint32", "U8": "uint8"}


@dataclass(frozen=True)
class StoredArray:
    """An array [V, ...] of a safetensors file.

    Attributes:
        file: The file.
        state: Its state when the base was loaded.
        name: The name of the array there.
        offset: The byte at which it starts.
        shape: Its shape.
        stored: The dtype there, as safetensors calls it.
        dtype: The dtype that the model has it in.
    """

    file: Path
    state: FileState
    name: str
    offset: int
    shape: tuple[int, ...]
    stored: str
    dtype: mx.Dtype

    @classmethod
    def find(cls, file: Path, name: str, dtype: mx.Dtype) -> "StoredArray":
        header, start = read_header(file)
        entry = header[name]
        offset = start + entry["data_offsets"][0]
        shape = tuple(entry["shape"])
        return cls(file, state_of(file), name, offset, shape, entry["dtype"], dtype)

    def rows(self, numbers: np.ndarray) -> mx.array:
        """Read some rows."""
        rows = np.empty((len(numbers), *self.shape[1:]), _DTYPES[self.stored])
        nbytes = rows[:1].nbytes
        with open_unchanged(self.file, self.state) as file:
            for row, number in zip(rows, numbers.tolist(), strict=True):
                content = os.pread(file.fileno(), nbytes, self.offset + number * nbytes)
                row[...] = np.frombuffer(content, row.dtype).reshape(row.shape)

        array = mx.array(rows)
        if self.stored == "BF16":
            array = array.view(mx.bfloat16)
        return array.astype(self.dtype)

    def whole(self) -> mx.array:
        return lazy_read(self.file, self.state)[self.name].astype(self.dtype)


@dataclass(frozen=True)
class StoredTable:
    """The rows of a module that is on disk.

    Attributes:
        arrays: Its arrays by their names in it.
        pieces: The same in files of `PIECE_ROWS` rows, of a head.
        count: Told how many bytes are read.
    """

    arrays: Mapping[str, StoredArray]
    pieces: Sequence[Path]
    count: Callable[[int], None]

    def at(self, tokens: np.ndarray) -> dict[str, mx.array]:
        """Read the rows of tokens [n]."""
        read = {name: array.rows(tokens) for name, array in self.arrays.items()}
        self.count(sum(array.nbytes for array in read.values()))
        return read

    def between(self, start: int, stop: int) -> dict[str, mx.array]:
        """Return rows that are read when they are computed."""
        rows = next(iter(self.arrays.values())).shape[0]
        if self.pieces and stop - start < rows:
            read = self._of_pieces(start, stop)
        else:
            read = {name: array.whole()[start:stop] for name, array in self.arrays.items()}
        self.count(sum(array.nbytes for array in read.values()))
        return read

    def _of_pieces(self, start: int, stop: int) -> dict[str, mx.array]:
        first = start // PIECE_ROWS
        files = self.pieces[first : -(-stop // PIECE_ROWS)]
        pieces = [lazy_read(file, state_of(file)) for file in files]
        rows = slice(start - first * PIECE_ROWS, stop - first * PIECE_ROWS)
        return {
            name: mx.concatenate([piece[name] for piece in pieces])[rows] for name in self.arrays
        }


def piece_files(folder: Path, path: str, rows: int) -> list[Path]:
    """Return the files of the pieces of a table of so many rows."""
    return [folder / f"{path}-{number}.safetensors" for number in range(-(-rows // PIECE_ROWS))]


def write_pieces(files: Sequence[Path], arrays: Mapping[str, mx.array]) -> None:
    """Write arrays [V, ...] as `piece_files`."""
    for number, file in enumerate(files):
        rows = slice(number * PIECE_ROWS, (number + 1) * PIECE_ROWS)
        save_tensors(file, {name: array[rows] for name, array in arrays.items()})
