"""Files that are no JSONL, converted to it once and then read like one: CSV, TSV and gzip.

The copy is in the cache under the hash of the file. Texts (.txt, .md) stay in memory.
"""

import codecs
import csv
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from ..cache import Cache
from ..errors import PackError
from ..files import free_bytes
from ..reading import open_regular, read_text, sha256
from .json_lines import MOST_LINE_BYTES, JsonLines
from .row_format import Row
from .sources import RowList

TEXT_SUFFIXES = (".txt", ".md")
ROWS = Cache("rows", days=30, is_needed=True)
_VERSION = 5  # of the copies
_MOST_GROWTH = 200  # times the size of a file, which gzip may unpack
_ALWAYS = 64 << 20  # bytes that it may unpack in addition
_BLOCK_BYTES = 1 << 20
_PIECE = 4000  # characters of a row of text, about a thousand tokens, where paragraphs allow that
_MOST_TEXT_BYTES = 1 << 30
_ONE_LINE = "A cell of .tsv has neither tabs nor line breaks in it. Save the table as .csv."
_IN_QUOTES = "Cells with commas or line breaks in them must be in quotes."
_QUOTED = re.compile(r'"([^"]*(?:""[^"]*)*)"')  # a cell in quotes; those within it are doubled


class Copy(JsonLines):
    """The JSONL copy of a stream; the place of a row is ``original[number]``."""

    def __init__(self, copy: Path, original: Path | str) -> None:
        super().__init__(copy)
        self._original = original
        self.folder = None
        if isinstance(original, Path):
            self.folder = original.parent

    def _status(self, f: BinaryIO) -> tuple[int, ...]:
        """Return the size: every use of a copy changes its time, and its content stays."""
        return (os.fstat(f.fileno()).st_size,)

    def where(self, i: int) -> str:
        return f"{self._original}[{i}]"


class CopiedLines(Copy):
    """The copy of a file, each row in the line that it has there: ``original:line``."""

    def where(self, i: int) -> str:
        _, _, line = JsonLines.where(self, i).rpartition(":")
        return f"{self._original}:{line}"


def gzip_rows(file: Path) -> CopiedLines:
    return _copied(file, "jsonl", lambda out: out.writelines(_blocks(file)))


def table_rows(file: Path) -> CopiedLines:
    """Read .csv or .tsv, also compressed; the first line names the columns."""
    if ".tsv" in Path(file.name.lower()).suffixes[-2:]:
        return _copied(file, "tsv", lambda out: _tabulate(file, _tsv_rows(file), _ONE_LINE, out))
    return _copied(file, "csv", lambda out: _tabulate(file, _csv_rows(file), _IN_QUOTES, out))


def text_rows(file: Path) -> RowList:
    """Return the paragraphs of a text; a row has as many as fit into 4,000 characters."""
    rows = []
    begun: list[str] = []
    start = 1  # line of the first paragraph in a row
    number = 0  # of lines so far
    text = read_text(file, _MOST_TEXT_BYTES).replace("\r\n", "\n")

    for paragraph in text.split("\n\n"):
        if begun and sum(map(len, begun)) + len(paragraph) > _PIECE:
            rows.append(_text_row(file, start, begun))
            begun = []
            start = number + 1

        begun.append(paragraph)
        number += paragraph.count("\n") + 2

    rows.append(_text_row(file, start, begun))
    return RowList([row for row in rows if row.value["text"]])


def _text_row(file: Path, line: int, paragraphs: list[str]) -> Row:
    return Row(f"{file}:{line}", {"text": "\n\n".join(paragraphs).strip()})


def _copied(file: Path, kind: str, write: Callable[[BinaryIO], None]) -> CopiedLines:
    name = f"{sha256(file)}-{kind.encode().hex()}-{_VERSION}.jsonl"
    return CopiedLines(ROWS.file(name, write), file)


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
                    raise PackError(
                        f"{file}: unpacks to more than {limit:,} bytes. Unpack it yourself if that "
                        "is right.",
                        "unreadable",
                    )
                yield block
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise PackError(f"{file}: cannot be unpacked ({error}).", "unreadable") from None


_Cells = tuple[int, list[str]]  # of a row of a table, and the line that it begins in


def _tabulate(file: Path, rows: Iterator[_Cells], advice: str, out: BinaryIO) -> None:
    """Write each row of a table as a JSON object of texts; the first one names the columns.

    Blank lines put it into the line of the table that it begins in. ``advice`` ends the error of a
    row that has more cells than the header, or fewer.
    """
    _, names = next(rows, (1, []))
    header = [name.strip() for name in names]
    if len(set(header)) != len(header) or "" in header:
        raise PackError(
            f"{file}:1: must name every column, each once, but has {header!r:.80}.", "data"
        )

    lines = 0  # written
    for line, cells in rows:
        if not cells:
            continue
        if len(cells) != len(header):
            raise PackError(
                f"{file}:{line}: has {len(cells)} cells, but the header has {len(header)}. "
                f"{advice}",
                "data",
            )

        row = dict(zip(header, cells, strict=True))
        out.write(b"\n" * (line - 1 - lines))
        out.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        lines = line


def _csv_rows(file: Path) -> Iterator[_Cells]:
    """Yield the rows of a .csv file: RFC 4180, or with semicolons or tabs for its commas."""
    csv.field_size_limit(MOST_LINE_BYTES)
    lines = _lines(file)
    header = next(lines, "")
    delimiter = max(",;\t", key=header.count)  # by the language of the spreadsheet
    reader = csv.reader(chain([header], lines), delimiter=delimiter, strict=True)

    line = 1
    try:
        for cells in reader:
            yield line, cells
            line = reader.line_num + 1
    except csv.Error as error:
        raise PackError(
            f"{file}:{line}: the row that begins here cannot be read to its end ({error}). A cell "
            "that begins with a quote must end with one; double the quotes within it.",
            "unreadable",
        ) from None


def _tsv_rows(file: Path) -> Iterator[_Cells]:
    """Yield the rows of a .tsv file, each a line; a cell that is quoted as a whole is unquoted.

    Other quotes are a part of the text: most programs that write .tsv quote nothing.
    """
    for number, line in enumerate(_lines(file), 1):
        cells = line.rstrip("\r\n").split("\t")
        if len(cells) == 1 and line.startswith('"') and line.count('"') % 2 == 1:
            raise PackError(f"{file}:{number}: a quote is not closed. {_ONE_LINE}", "data")
        if cells == [""]:
            cells = []
        yield number, [_unquoted(cell) for cell in cells]


def _unquoted(cell: str) -> str:
    quoted = _QUOTED.fullmatch(cell)
    return quoted[1].replace('""', '"') if quoted else cell


def _lines(file: Path) -> Iterator[str]:
    """Line ends are kept."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    rest = ""
    try:
        for block in _blocks(file):
            lines = io.StringIO(rest + decoder.decode(block), newline="").readlines()
            rest = lines.pop() if lines else ""
            if len(rest) > MOST_LINE_BYTES:
                raise PackError(f"{file}: a line is longer than {MOST_LINE_BYTES:,} bytes.", "data")

            yield from lines
        yield from io.StringIO(rest + decoder.decode(b"", final=True), newline="").readlines()
    except UnicodeDecodeError:
        raise PackError(f"{file}: is not UTF-8 text. Save it as UTF-8.", "unreadable") from None
