"""Rows that stay where they are: sequences that read a row on access."""

import bisect
import hashlib
import itertools
import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, overload

import numpy as np

from ..errors import PackError
from ..reading import sha256
from .formats import Row

_GAP = 16  # rows that are not wanted: fewer are read all the same
_PARQUET_ROWS = 1024  # in memory at a time


class Rows(Sequence[Row]):
    """The rows of a split or of a part of it, each read when it is needed."""

    @abstractmethod
    def read(self, start: int, stop: int) -> Iterator[Row]:
        """Yield the rows from ``start`` to ``stop``, from first to last."""

    @abstractmethod
    def where(self, i: int) -> str:
        """Return the place of a row, as messages name it; nothing is read."""

    @abstractmethod
    def nbytes(self, start: int, stop: int) -> int:
        """Return about how many bytes of text these rows have."""

    def content_key(self) -> bytes | None:
        """Return a hash of everything in the rows; None for a value that JSON does not have.

        Columns count in their order, which shows in what a chat template renders.
        """
        digest = hashlib.sha256()
        try:
            for row in self:
                line = json.dumps(row.value, ensure_ascii=False)
                digest.update(line.encode(errors="surrogatepass") + b"\n")
        except (TypeError, ValueError, RecursionError):
            return None
        return digest.digest()

    def is_in_files(self) -> bool:
        """Return whether another process can read the rows, since they are not in memory here."""
        return False

    def places(self) -> Callable[[int], str]:
        """Return `where`, without what it does not need in memory."""
        return self.where

    @overload
    def __getitem__(self, i: int) -> Row: ...
    @overload
    def __getitem__(self, i: slice) -> "Rows": ...
    def __getitem__(self, i: int | slice) -> "Row | Rows":
        if isinstance(i, slice):
            chosen = range(len(self))[i]
            assert chosen.step == 1
            return Part(self, chosen.start, max(chosen.start, chosen.stop))
        i = range(len(self))[i]
        return next(self.read(i, i + 1))

    def __iter__(self) -> Iterator[Row]:
        return self.read(0, len(self))


class Part(Rows):
    """Some consecutive rows of others."""

    def __init__(self, rows: Rows, start: int, stop: int) -> None:
        self.rows, self.start, self.stop = rows, start, stop

    def __len__(self) -> int:
        return self.stop - self.start

    def read(self, start: int, stop: int) -> Iterator[Row]:
        """Yield the rows from ``start`` to ``stop``."""
        return self.rows.read(self.start + start, self.start + stop)

    def where(self, i: int) -> str:
        """Return the place of a row."""
        return self.rows.where(self.start + i)

    def nbytes(self, start: int, stop: int) -> int:
        """Return about how many bytes of text these rows have."""
        return self.rows.nbytes(self.start + start, self.start + stop)

    def content_key(self) -> bytes | None:
        """Return a hash of everything in the rows, and which of them these are."""
        key = self.rows.content_key()
        return key and key + f"[{self.start}:{self.stop}]".encode()

    def is_in_files(self) -> bool:
        """Return whether another process can read the rows."""
        return self.rows.is_in_files()

    def places(self) -> Callable[[int], str]:
        """Return `where`, without what it does not need in memory."""
        where, start = self.rows.places(), self.start
        return lambda i: where(start + i)


class Chosen(Rows):
    """Some rows of others, in their order.

    Args:
        rows: the others.
        indices: which of them, increasing.
    """

    def __init__(self, rows: Rows, indices: np.ndarray) -> None:
        self.rows, self.indices = rows, indices

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, start: int, stop: int) -> Iterator[Row]:
        """Yield the rows from ``start`` to ``stop``; small gaps are read, and left out."""
        wanted = self.indices[start:stop]
        ends = [*(np.flatnonzero(np.diff(wanted) > _GAP) + 1).tolist(), len(wanted)]
        for low, high in zip([0, *ends], ends, strict=False):
            piece = wanted[low:high]
            if len(piece):
                first = int(piece[0])
                chosen = np.zeros(int(piece[-1]) - first + 1, bool)
                chosen[piece - first] = True
                rows = self.rows.read(first, first + len(chosen))
                yield from itertools.compress(rows, chosen.tolist())

    def where(self, i: int) -> str:
        """Return the place of a row."""
        return self.rows.where(int(self.indices[i]))

    def nbytes(self, start: int, stop: int) -> int:
        """Return about how many bytes of text these rows have."""
        return self.rows.nbytes(0, len(self.rows)) * (stop - start) // max(1, len(self.rows))

    def content_key(self) -> bytes | None:
        """Return a hash of everything in the rows, and which of them these are."""
        key = self.rows.content_key()
        return key and key + hashlib.sha256(self.indices.astype("<i8").tobytes()).digest()

    def is_in_files(self) -> bool:
        """Return whether another process can read the rows."""
        return self.rows.is_in_files()

    def places(self) -> Callable[[int], str]:
        """Return `where`, without what it does not need in memory."""
        where, indices = self.rows.places(), self.indices
        return lambda i: where(int(indices[i]))


class Joined(Rows):
    """The rows of several sources, those of one after those of another."""

    def __init__(self, parts: Sequence[Sequence[Row]]) -> None:
        self.parts = [as_rows(part) for part in parts]
        self.edges = np.cumsum([0, *map(len, self.parts)]).tolist()

    def __len__(self) -> int:
        return self.edges[-1]

    def _ranges(self, start: int, stop: int) -> Iterator[tuple[Rows, int, int]]:
        """Yield what of each part these rows are."""
        for i in range(bisect.bisect_right(self.edges, start) - 1, len(self.parts)):
            first, end = self.edges[i], self.edges[i + 1]
            if first >= stop:
                return
            if start < end:
                yield self.parts[i], max(start, first) - first, min(stop, end) - first

    def read(self, start: int, stop: int) -> Iterator[Row]:
        """Yield the rows from ``start`` to ``stop``."""
        for part, low, high in self._ranges(start, stop):
            yield from part.read(low, high)

    def where(self, i: int) -> str:
        """Return the place of a row."""
        ((part, low, _),) = self._ranges(i, i + 1)
        return part.where(low)

    def nbytes(self, start: int, stop: int) -> int:
        """Return about how many bytes of text these rows have."""
        return sum(part.nbytes(low, high) for part, low, high in self._ranges(start, stop))

    def is_in_files(self) -> bool:
        """Return whether another process can read the rows."""
        return all(part.is_in_files() for part in self.parts)

    def content_key(self) -> bytes | None:
        """Return the hashes of all parts."""
        keys = [part.content_key() for part in self.parts]
        return None if None in keys else b"+".join(key for key in keys if key is not None)


def as_rows(rows: Sequence[Row]) -> Rows:
    """Return rows that may be in memory as `Rows`."""
    return rows if isinstance(rows, Rows) else Listed(rows)


class Listed(Rows):
    """Rows that are in memory."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, start: int, stop: int) -> Iterator[Row]:
        """Yield the rows from ``start`` to ``stop``."""
        return itertools.islice(self.rows, start, stop)

    def where(self, i: int) -> str:
        """Return the place of a row."""
        return self.rows[i].where

    def nbytes(self, start: int, stop: int) -> int:
        """Return the bytes of these rows, from a hundred of them."""
        chosen = range(start, stop, max(1, (stop - start) // 100))
        sampled = sum(len(str(self.rows[i].value)) for i in chosen)
        return sampled * (stop - start) // max(1, len(chosen))

    def places(self) -> Callable[[int], str]:
        """Return `where`, without the rows' values."""
        return [row.where for row in self.rows].__getitem__


class Numbered(Rows):
    """Rows of a source that has them by number and yields them in order (`datasets.Dataset`).

    Args:
        name: of the source; a place is ``name[number]``.
        values: the rows.
        rename: columns that are called otherwise, by the source's names.
    """

    def __init__(
        self, name: str, values: Sequence[Mapping], rename: Mapping[str, str] | None = None
    ) -> None:
        self.name, self.values, self.rename = name, values, rename or {}

    def __len__(self) -> int:
        return len(self.values)

    def read(self, start: int, stop: int) -> Iterator[Row]:
        """Yield the rows from ``start`` to ``stop``."""
        in_order: Iterable = (
            itertools.islice(self.values, start, stop)
            if start == 0
            else (self.values[i] for i in range(start, stop))
        )
        for i, value in enumerate(in_order, start):
            yield Row(self.where(i), {self.rename.get(k, k): v for k, v in value.items()})

    def where(self, i: int) -> str:
        """Return the place of a row."""
        return f"{self.name}[{i}]"

    def nbytes(self, start: int, stop: int) -> int:
        """Return the bytes of these rows, from a hundred of them."""
        chosen = range(start, stop, max(1, (stop - start) // 100))
        return sum(len(str(self.values[i])) for i in chosen) * (stop - start) // max(1, len(chosen))


class Parquet(Rows):
    """The rows of a parquet file, of which a group's batch is in memory at a time."""

    def __init__(self, file: Path) -> None:
        self.file = file
        with self._opened() as table:
            facts = table.metadata
            groups = [facts.row_group(i) for i in range(facts.num_row_groups)]
            self._edges = np.cumsum([0, *(group.num_rows for group in groups)]).tolist()
            self._bytes = sum(group.total_byte_size for group in groups)

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        """Open the file meanwhile, one of a thousand shards; what pyarrow raises is a PackError."""
        try:
            import pyarrow.parquet as parquet
        except ImportError:
            raise PackError(
                f"{self.file}: reading parquet needs `pip install pyarrow`.", "dependency"
            ) from None
        try:
            with parquet.ParquetFile(self.file, memory_map=True) as table:
                yield table
        except PackError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            raise PackError(
                f"{self.file}: cannot be read as parquet: {reason}", "unreadable"
            ) from None

    def __len__(self) -> int:
        return self._edges[-1]

    def read(self, start: int, stop: int) -> Iterator[Row]:
        """Yield the rows from ``start`` to ``stop``."""
        group = bisect.bisect_right(self._edges, start) - 1
        number = self._edges[group]
        with self._opened() as table:
            groups = range(group, bisect.bisect_left(self._edges, stop))
            for batch in table.iter_batches(_PARQUET_ROWS, row_groups=list(groups)):
                low, high = max(start - number, 0), min(stop - number, batch.num_rows)
                if low < high:
                    values = batch.slice(low, high - low).to_pylist()
                    for i, value in enumerate(values, number + low):
                        yield Row(self.where(i), value)
                number += batch.num_rows

    def where(self, i: int) -> str:
        """Return the place of a row."""
        return f"{self.file}[{i}]"

    def content_key(self) -> bytes:
        """Return the SHA-256 of the file."""
        return bytes.fromhex(sha256(self.file))

    def is_in_files(self) -> bool:
        """Return whether another process can read the rows."""
        return True

    def nbytes(self, start: int, stop: int) -> int:
        """Return about how many bytes these rows have, uncompressed."""
        return self._bytes * (stop - start) // max(1, len(self))
