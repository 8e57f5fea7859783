"""Rows that stay where they are: each is read from its file, list or data set when it is needed."""

import bisect
import hashlib
import itertools
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, overload

import numpy as np

from ..errors import Code, PackError
from ..reading import sha256
from .formats import Row
from .images import hashed_text
from .row_format import LazyRow, RowError, label_names, parquet_features

_GAP = 16  # rows between two that are selected: fewer are read all the same
_PARQUET_ROWS = 1024  # in memory at a time
_CANONICAL = json.JSONEncoder(sort_keys=True, ensure_ascii=False, default=hashed_text)


def data_error(data: object, fault: str, code: Code = "data") -> PackError:
    """Return an error of what ``--data`` names."""
    return PackError(f"--data {data}: {fault}", code)


def file_error(place: object, fault: str, code: Code = "unreadable") -> PackError:
    """Return an error of a file of examples, or of a line of it."""
    return PackError(fault, code, "data", place)


class Source(ABC):
    """A file, list or data set whose rows are read by number."""

    per_row = 1  # of each row that bad rows are counted by
    is_in_files = False  # whether another process can read the rows

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of rows."""

    @abstractmethod
    def read(self, start: int, stop: int) -> Iterator[Row]:
        """Yield the rows from ``start`` to ``stop``, from first to last."""

    @abstractmethod
    def where(self, i: int) -> str:
        """Return the place of a row, as messages name it; nothing is read."""

    def text(self, i: int, most: int) -> str:
        """Return the first ``most`` characters of a row, by default as JSON."""
        (row,) = self.read(i, i + 1)
        return json.dumps(row.value, ensure_ascii=False, default=str)[:most]

    def nbytes(self) -> int:
        """Return about how many bytes of text the rows have, by default from a hundred of them."""
        sample = range(0, len(self), max(1, len(self) // 100))
        total = sum(len(str(next(self.read(i, i + 1)).value)) for i in sample)
        return total * len(self) // max(1, len(sample))

    def content_key(self) -> bytes | None:
        """Return a hash of everything in the rows; None for a value that JSON does not have.

        Columns count in their order, which shows in what a chat template renders.
        """
        digest = hashlib.sha256()
        try:
            for row in self.read(0, len(self)):
                line = json.dumps(row.value, ensure_ascii=False)
                digest.update(line.encode(errors="surrogatepass") + b"\n")
        except (TypeError, ValueError, RecursionError):
            return None

        return digest.digest()


class Rows(Sequence[Row]):
    """The rows of a split or of a part of it, each read when it is needed.

    Rows are numbered across all sources; ``indices`` has rising numbers, or None for all rows.
    """

    def __init__(
        self, sources: Sequence[Source] = (), indices: range | np.ndarray | None = None
    ) -> None:
        self.sources = sources
        self._edges: list[int] = np.cumsum([0, *map(len, sources)]).tolist()
        self.indices = range(self._edges[-1]) if indices is None else indices
        self.per_row = max((source.per_row for source in sources), default=1)

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, i: int) -> Row: ...
    @overload
    def __getitem__(self, i: slice) -> "Rows": ...
    def __getitem__(self, i: int | slice) -> "Row | Rows":
        if isinstance(i, slice):
            assert i.step in (None, 1)
            return Rows(self.sources, self.indices[i])

        number = int(self.indices[i])
        return next(self._read(number, number + 1))

    def __iter__(self) -> Iterator[Row]:
        if isinstance(self.indices, range):
            yield from self._read(self.indices.start, self.indices.stop)
            return

        after_gaps = np.flatnonzero(np.diff(self.indices) > _GAP) + 1
        edges = [0, *after_gaps.tolist(), len(self)] if len(self) else []
        for low, high in itertools.pairwise(edges):
            numbers = self.indices[low:high]
            first = int(numbers[0])
            last = int(numbers[-1])
            selected = np.zeros(last + 1 - first, bool)
            selected[numbers - first] = True
            yield from itertools.compress(self._read(first, last + 1), selected.tolist())

    def select(self, indices: np.ndarray) -> "Rows":
        """``indices`` must rise."""
        if isinstance(self.indices, range):
            return Rows(self.sources, indices + self.indices.start)
        return Rows(self.sources, self.indices[indices])

    def where(self, i: int) -> str:
        source, number = _located(self._edges, self.indices[i])
        return self.sources[source].where(number)

    def text(self, i: int, most: int) -> str:
        source, number = _located(self._edges, self.indices[i])
        return self.sources[source].text(number, most)

    def numbered(self, numbers: Collection[int]) -> dict[int, int]:
        """Return rows by index whose places have some numbers: 17 of ``train.jsonl:17``."""
        places = ((i, re.search(r"[:\[](\d+)\]?$", self.where(i))) for i in range(len(self)))
        return {i: int(place[1]) for i, place in places if place and int(place[1]) in numbers}

    def nbytes(self) -> int:
        total = sum(source.nbytes() for source in self.sources)
        return total * len(self) // max(1, self._edges[-1])

    def content_key(self) -> bytes | None:
        """Hash everything in the sources, and which of their rows these are."""
        keys: list[bytes] = []
        for source in self.sources:
            if (key := source.content_key()) is None:
                return None
            keys.append(key)

        if isinstance(self.indices, range):
            selected = f"[{self.indices.start}:{self.indices.stop}]".encode()
        else:
            selected = hashlib.sha256(self.indices.astype("<i8").tobytes()).digest()
        return b"+".join(keys) + selected

    def fingerprint(self) -> str:
        """Return the hash of the rows by which a resumed run knows them again."""
        digest = hashlib.sha256()
        for row in self:
            digest.update(canonical_line(row))
        return digest.hexdigest()

    def is_in_files(self) -> bool:
        return all(source.is_in_files for source in self.sources)

    def _read(self, start: int, stop: int) -> Iterator[Row]:
        first, _ = _located(self._edges, start)
        for source in range(first, len(self.sources)):
            edge = self._edges[source]
            if edge >= stop:
                return
            low = max(start, edge)
            high = min(stop, self._edges[source + 1])
            if low < high:
                yield from self.sources[source].read(low - edge, high - edge)


def _located(edges: Sequence[int], number: int) -> tuple[int, int]:
    """Return the source that has a row, and its number there; sources begin at ``edges``."""
    source = bisect.bisect_right(edges, number) - 1
    return source, int(number) - edges[source]


def as_rows(rows: Sequence[Row]) -> Rows:
    return rows if isinstance(rows, Rows) else Rows([RowList(rows)])


def canonical_line(row: Row) -> bytes:
    """Return a row as the line of JSON that fingerprints hash, however its file is written."""
    return _CANONICAL.encode(row.value).encode(errors="surrogatepass") + b"\n"


class RowList(Source):
    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, start: int, stop: int) -> Iterator[Row]:
        return iter(self.rows[start:stop])

    def where(self, i: int) -> str:
        return self.rows[i].where


def _raise(error: RowError) -> NoReturn:
    raise error


class ConvertedRows(Source):
    """Rows that are made of others, ``per_row`` of each; messages name the row they are made of.

    ``convert`` yields them, and ``how`` tells it from other functions where tokens are cached.
    Another process encodes them only if ``convert`` can be pickled.
    """

    def __init__(
        self,
        rows: Rows,
        convert: Callable[[Row], Iterable[Row]],
        how: str,
        per_row: int = 1,
    ) -> None:
        self.rows = rows
        self.convert = convert
        self.how = how
        self.per_row = per_row
        self.is_in_files = rows.is_in_files()

    def __len__(self) -> int:
        return self.per_row * len(self.rows)

    def read(self, start: int, stop: int) -> Iterator[Row]:
        originals = self.rows[start // self.per_row : -(-stop // self.per_row)]
        converted = itertools.chain.from_iterable(map(self._converted, originals))
        first = start % self.per_row
        return itertools.islice(converted, first, first + stop - start)

    def _converted(self, row: Row) -> Iterable[Row]:
        """A row that cannot be converted has its error in place of its columns."""
        try:
            return list(self.convert(row))
        except RowError as error:
            return [LazyRow(row.where, partial(_raise, error))] * self.per_row

    def where(self, i: int) -> str:
        return self.rows.where(i // self.per_row)

    def nbytes(self) -> int:
        return self.rows.nbytes()

    def content_key(self) -> bytes | None:
        key = self.rows.content_key()
        return key and key + self.how.encode()


class ValueList(Source):
    """The values of a list or data set as rows; messages call a row ``name[number]``.

    ``convert`` returns the columns of a row, given its value. ``folder`` is the file's.
    """

    def __init__(
        self,
        name: str,
        values: Sequence[Any],
        convert: Callable[[Any], Any] | None = None,
        folder: Path | None = None,
    ) -> None:
        self.name = name
        self.values = values
        self.convert = convert
        self.folder = folder

    def __len__(self) -> int:
        return len(self.values)

    def read(self, start: int, stop: int) -> Iterator[Row]:
        """Values may be no mappings: who uses a row checks that."""
        values: Iterable[Any] = (self.values[i] for i in range(start, stop))
        if start == 0:  # data sets iterate faster than they index
            values = itertools.islice(self.values, stop)
        for i, value in enumerate(values, start):
            if self.convert is not None:
                value = self.convert(value)
            yield Row(self.where(i), value, self.folder)

    def where(self, i: int) -> str:
        return f"{self.name}[{i}]"


class Parquet(Source):
    """A parquet file; a batch of one row group is in memory at a time."""

    is_in_files = True

    def __init__(self, file: Path) -> None:
        self.file = file
        with self._opened() as table:
            facts = table.metadata
            groups = [facts.row_group(i) for i in range(facts.num_row_groups)]
            self._edges = np.cumsum([0, *(group.num_rows for group in groups)]).tolist()
            self._bytes = sum(group.total_byte_size for group in groups)
            self._with_names = label_names(parquet_features(table.metadata.metadata))

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        """Open the file only while it is read: there may be a thousand. Errors are PackErrors."""
        try:
            import pyarrow.parquet as parquet
        except ImportError:
            fault = "reading parquet needs `pip install pyarrow`."
            raise file_error(self.file, fault, "dependency") from None

        try:
            with parquet.ParquetFile(self.file, memory_map=True) as table:
                yield table
        except PackError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            raise file_error(self.file, f"cannot be read as parquet: {reason}") from None

    def __len__(self) -> int:
        return self._edges[-1]

    def read(self, start: int, stop: int) -> Iterator[Row]:
        group = bisect.bisect_right(self._edges, start) - 1
        number = self._edges[group]

        with self._opened() as table:
            groups = range(group, bisect.bisect_left(self._edges, stop))
            for batch in table.iter_batches(_PARQUET_ROWS, row_groups=list(groups)):
                low = max(start - number, 0)
                high = min(stop - number, batch.num_rows)
                if low < high:
                    values = batch.slice(low, high - low).to_pylist()
                    for i, value in enumerate(values, number + low):
                        yield Row(self.where(i), self._with_names(value), self.file.parent)
                number += batch.num_rows

    def where(self, i: int) -> str:
        return f"{self.file}[{i}]"

    def content_key(self) -> bytes:
        return bytes.fromhex(sha256(self.file))

    def nbytes(self) -> int:
        """Return the bytes uncompressed."""
        return self._bytes
