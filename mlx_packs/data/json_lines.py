"""JSONL files whose rows are read and parsed when they are needed.

Only the offset of each row is in memory, 8 bytes per row. The text stays in the file.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..errors import PackError
from .bad_rows import RowError
from .cells import MOST_DEPTH, is_deep
from .formats import Row
from .sources import Source

# Of one row: while it is encoded, its tokens take a hundred times as much.
MOST_LINE_BYTES = 16 << 20
_BLOCK_BYTES = 1 << 20  # that are read at a time
BOM = b"\xef\xbb\xbf"  # Windows editors begin with it
_COMPRESSED = {b"\x1f\x8b": "gzip", b"(\xb5/\xfd": "zstd", b"PK\x03\x04": "zip", b"BZh": "bzip2"}


class LineRow(Row):
    """A line of a JSONL file, parsed when its value is first read."""

    def __init__(self, where: str, line: bytes, folder: Path | None = None) -> None:
        object.__setattr__(self, "where", where)
        object.__setattr__(self, "folder", folder)
        object.__setattr__(self, "line", line)

    @cached_property
    def value(self) -> Mapping:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The columns; a RowError if the line is no JSON or exceeds a limit."""
        return parse_line(self.where, self.line)


def parse_line(where: str, line: bytes) -> Any:
    """Return the JSON value of a line; a RowError if it is none, too deep or too long."""
    if len(line) > MOST_LINE_BYTES:
        fault = (
            f"the line is longer than {MOST_LINE_BYTES >> 20} MiB. Split it into several examples."
        )
        raise RowError(where, fault, "line too long")
    return parse_json(where, line.rstrip())


def parse_json(where: str, content: bytes) -> Any:
    """Return the JSON value of a line or a file; a RowError if it is none or too deep.

    As in Python, the last of equal keys counts, and NaN and Infinity are numbers.
    """
    try:
        text = content.decode()
        value = json.loads(text)
        too_deep = text.count("[") + text.count("{") > MOST_DEPTH and is_deep(value)
    except UnicodeDecodeError as error:
        fault = f"is not UTF-8 text (byte {error.start + 1})."
        raise RowError(where, fault, "not UTF-8", "unreadable") from None
    except json.JSONDecodeError as error:
        if error.lineno > 1:
            where = f"{where}:{error.lineno}"
        line = text.split("\n")[error.lineno - 1]
        shown = line[:60] + "…" if len(line) >= 60 else line
        fault = f"is not valid JSON ({error.msg} at column {error.colno}). Shown: {shown.strip()}"
        raise RowError(where, fault, "not JSON", "unreadable") from None
    except ValueError:  # Python's limit for turning text into integers
        fault = "an integer has more than 4300 digits. Write it as a text."
        raise RowError(where, fault, "integer too long", "unreadable") from None
    except RecursionError:
        too_deep = True

    if too_deep:
        fault = f"lists and objects are nested more than {MOST_DEPTH} deep."
        raise RowError(where, fault, "too deep", "unreadable")

    return value


class JsonLines(Source):
    """The rows of a JSONL file; blank lines are none."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.folder: Path | None = file.parent
        with file.open("rb") as f:
            self._opened = self._status(f)
            beginning = f.read(4)
            for magic, name in _COMPRESSED.items():
                if beginning.startswith(magic):
                    raise PackError(
                        f"{file}: is compressed ({name}), not JSON. Decompress it first.",
                        "unreadable",
                    )
            f.seek(0)
            self._scan(f)

    def _scan(self, f: BinaryIO) -> None:
        """Find where the rows begin, which lines are blank, and the hash of the file."""
        digest = hashlib.sha256()
        lines = [np.array([], np.int64)]
        doubts = [np.array([], bool)]
        size = 0
        begins = True  # whether a line begins with the block
        while block := f.read(4 * _BLOCK_BYTES):
            digest.update(block)
            data = np.frombuffer(block, np.uint8)
            edges = np.flatnonzero(data == 10) + 1
            if begins:
                edges = np.concatenate([[0], edges])
            begins = len(edges) > 0 and bool(edges[-1] == len(data))
            edges = edges[: len(edges) - begins]

            lines.append(size + edges)
            doubts.append(data[edges] <= 32)  # what a blank line may begin with
            size += len(block)

        starts = np.concatenate(lines)
        blank = np.concatenate(doubts)
        lengths = np.diff(starts, append=size)

        for i in np.flatnonzero(blank & (lengths > 1)):
            f.seek(int(starts[i]))
            blank[i] = not f.read(min(int(lengths[i]), MOST_LINE_BYTES)).strip()

        self._starts = np.append(starts[~blank], size)
        numbers = np.flatnonzero(blank)
        self._rows_before_blanks = numbers - np.arange(len(numbers))
        self._key = digest.digest()

    def __len__(self) -> int:
        return len(self._starts) - 1

    def read(self, start: int, stop: int) -> Iterator[Row]:
        """Keep one block of lines in memory at a time."""
        with self.file.open("rb") as f:
            if self._status(f) != self._opened:
                raise PackError(
                    f"{self.file}: was changed while it is being read. Start again.", "unreadable"
                )

            while start < stop:
                begin = int(self._starts[start])
                end = int(np.searchsorted(self._starts, begin + _BLOCK_BYTES, "right")) - 1
                end = min(max(end, start + 1), stop)
                edges = (self._starts[start : end + 1] - begin).tolist()

                f.seek(begin)
                # of a line that is too long anyway the beginning
                block = f.read(min(edges[-1], max(_BLOCK_BYTES, MOST_LINE_BYTES + 1)))

                for i, (low, high) in enumerate(zip(edges, edges[1:], strict=False), start):
                    line = block[low:high]
                    if i == 0:
                        line = line.removeprefix(BOM)
                    yield LineRow(self.where(i), line, self.folder)

                start = end

    def where(self, i: int) -> str:
        blanks = self._rows_before_blanks
        before = np.searchsorted(blanks, i, "right") if len(blanks) else 0
        return f"{self.file}:{i + 1 + before}"

    def nbytes(self, start: int, stop: int) -> int:
        return int(self._starts[stop] - self._starts[start])

    def content_key(self) -> bytes:
        return self._key

    def is_in_files(self) -> bool:
        return True

    def _status(self, f: BinaryIO) -> tuple[int, ...]:
        status = os.fstat(f.fileno())
        return status.st_size, status.st_mtime_ns, status.st_ino
