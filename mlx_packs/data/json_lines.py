"""JSONL files, and files that are converted to JSONL once: CSV, TSV and gzip.

Rows are read and parsed when they are needed. Only the offset of each row is in memory, 8 bytes per
row. The converted copy is in the cache, under the hash of the file. Texts stay in memory.
"""

import codecs
import csv
import gzip
import hashlib
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..cache import Cache
from ..files import free_bytes
from ..reading import depth_of, open_regular, read_text, sha256
from .row_format import MOST_DEPTH, LazyRow, Row, RowError
from .sources import RowList, Source, file_error

# Of one row: while it is encoded, its tokens take a hundred times as much.
MOST_LINE_BYTES = 16 << 20
_BLOCK_BYTES = 1 << 20  # that are read at a time
BOM = b"\xef\xbb\xbf"  # Windows editors begin with it
TEXT_SUFFIXES = (".txt", ".md")
ROWS = Cache("rows", days=30, is_needed=True)
_VERSION = 5  # of the copies
_MOST_GROWTH = 200  # times the size of a file, which gzip may unpack
_ALWAYS = 64 << 20  # bytes that it may unpack in addition
_PIECE = 4000  # characters of a row of text, about a thousand tokens, where paragraphs allow that
_MOST_TEXT_BYTES = 1 << 30


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
        containers = text.count("[") + text.count("{")
        too_deep = containers > MOST_DEPTH and depth_of(value) > MOST_DEPTH
    except UnicodeDecodeError as error:
        fault = f"is not UTF-8 text (byte {error.start + 1})."
        raise RowError(where, fault, "not UTF-8", "unreadable") from None
    except json.JSONDecodeError as error:
        if error.lineno > 1:
            where = f"{where}:{error.lineno}"
        line = text.split("\n")[error.lineno - 1]
        shown = line[:60] + "…" if len(line) >= 60 else line
        reason = error.msg.removesuffix(" at")
        fault = f"is not valid JSON ({reason} at column {error.colno}). Shown: {shown.strip()}"
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
    """The rows of a JSONL file; blank lines are none.

    If the file is a copy, messages name its ``original``: the line of a row, or the number of the
    row if the copy has other lines than the original.
    """

    is_in_files = True

    def __init__(
        self, file: Path, original: Path | str | None = None, has_same_lines: bool = True
    ) -> None:
        self.file = file
        self._place = original or file
        self._is_copy = original is not None
        self._has_same_lines = has_same_lines
        self.folder = self._place.parent if isinstance(self._place, Path) else None

        with file.open("rb") as f:
            self._opened = self._status(f)
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
                raise file_error(self.file, "was changed while it is being read. Start again.")

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
                    where = self.where(i)
                    yield LazyRow(where, partial(parse_line, where, line), self.folder)

                start = end

    def where(self, i: int) -> str:
        if not self._has_same_lines:
            return f"{self._place}[{i}]"
        blanks = self._rows_before_blanks
        before = np.searchsorted(blanks, i, "right") if len(blanks) else 0
        return f"{self._place}:{i + 1 + before}"

    def text(self, i: int, most: int) -> str:
        with self.file.open("rb") as f:
            f.seek(int(self._starts[i]))
            line = f.read(min(4 * most, int(self._starts[i + 1] - self._starts[i])))
        return line.removeprefix(BOM).decode(errors="replace").strip()[:most]

    def nbytes(self) -> int:
        return int(self._starts[-1] - self._starts[0])

    def content_key(self) -> bytes:
        return self._key

    def _status(self, f: BinaryIO) -> tuple[int, ...]:
        status = os.fstat(f.fileno())
        if self._is_copy:  # every use of a copy changes its time, and its content stays
            return (status.st_size,)
        return status.st_size, status.st_mtime_ns, status.st_ino


def gzip_rows(file: Path) -> JsonLines:
    return _copied(file, "jsonl", lambda out: out.writelines(_blocks(file)))


def table_rows(file: Path) -> JsonLines:
    """Read .csv or .tsv, also compressed; the first line names the columns."""
    delimiters = ",;\t"  # by the language of the spreadsheet
    if ".tsv" in Path(file.name.lower()).suffixes[-2:]:
        delimiters = "\t"
    return _copied(file, f"cells {delimiters}", lambda out: _tabulate(file, delimiters, out))


def text_rows(file: Path) -> RowList:
    """Return the paragraphs of a text; a row has as many as fit into 4,000 characters."""
    paragraphs: dict[int, list[str]] = {}  # of each row, by the line of its first one
    start = number = 1
    text = read_text(file, _MOST_TEXT_BYTES).replace("\r\n", "\n")

    for paragraph in text.split("\n\n"):
        if sum(map(len, paragraphs.get(start, ()))) + len(paragraph) > _PIECE:
            start = number
        paragraphs.setdefault(start, []).append(paragraph)
        number += paragraph.count("\n") + 2

    texts = {line: "\n\n".join(parts).strip() for line, parts in paragraphs.items()}
    return RowList([Row(f"{file}:{line}", {"text": t}) for line, t in texts.items() if t])


def _copied(file: Path, kind: str, write: Callable[[BinaryIO], None]) -> JsonLines:
    name = f"{sha256(file)}-{kind.encode().hex()}-{_VERSION}.jsonl"
    return JsonLines(ROWS.file(name, write), file)


def _blocks(file: Path) -> Iterator[bytes]:
    """Yield the content of a file, uncompressed; more than a limit is an error."""
    limit = _MOST_GROWTH * file.stat().st_size + _ALWAYS
    room = free_bytes(ROWS.path)
    if room is not None:
        limit = min(limit, room // 2)

    total = 0
    with open_regular(file) as raw:
        source = gzip.GzipFile(fileobj=raw) if file.suffix.lower() == ".gz" else raw
        try:
            while block := source.read(_BLOCK_BYTES):
                total += len(block)
                if total > limit:
                    fault = f"unpacks to more than {limit:,} bytes. Unpack it if that is right."
                    raise file_error(file, fault)
                yield block
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise file_error(file, f"cannot be unpacked ({error}).") from None


def _tabulate(file: Path, delimiters: str, out: BinaryIO) -> None:
    """Write each row of a table as a JSON object of texts; the first one names the columns.

    Blank lines put it into the line of the table that it begins in.
    """
    rows = _cells(file, delimiters)
    _, names = next(rows, (1, []))
    header = [name.strip() for name in names]
    if len(set(header)) != len(header) or "" in header:
        fault = f"must name every column, each once, but has {header!r:.80}."
        raise file_error(f"{file}:1", fault, "data")

    lines = 0  # written
    for line, cells in rows:
        if not cells:
            continue
        if len(cells) != len(header):
            fault = (
                f"has {len(cells)} cells, but the header has {len(header)}. Cells with separators "
                "or line breaks in them must be in quotes."
            )
            raise file_error(f"{file}:{line}", fault, "data")

        row = dict(zip(header, cells, strict=True))
        out.write(b"\n" * (line - 1 - lines))
        out.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        lines = line


def _cells(file: Path, delimiters: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the line that each row begins in, and its cells: RFC 4180, but for the delimiter.

    That is the one of ``delimiters`` which the header has most often.
    """
    csv.field_size_limit(MOST_LINE_BYTES)
    lines = _lines(file)
    header = next(lines, "")
    delimiter = max(delimiters, key=header.count)
    reader = csv.reader(chain([header], lines), delimiter=delimiter, strict=True)

    line = 1
    try:
        for cells in reader:
            yield line, cells
            line = reader.line_num + 1
    except csv.Error as error:
        fault = (
            f"the row that starts here cannot be read to its end ({error}). A cell that starts "
            "with a quote must end with one; double the quotes within it."
        )
        raise file_error(f"{file}:{line}", fault) from None


def _lines(file: Path) -> Iterator[str]:
    """Line ends are kept."""
    rest = ""
    try:
        for text in codecs.iterdecode(_blocks(file), "utf-8-sig"):
            *lines, rest = io.StringIO(rest + text, newline="").readlines() or [""]
            if len(rest) > MOST_LINE_BYTES:
                raise file_error(file, f"a line is longer than {MOST_LINE_BYTES:,} bytes.", "data")
            yield from lines
        if rest:
            yield rest
    except UnicodeDecodeError:
        raise file_error(file, "is not UTF-8 text. Save it as UTF-8.") from None
