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
import tempfile
import zlib
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from ..errors import PackError
from ..files import cache_folder, free_bytes, remove_unused, replace_file, write_errors
from ..leftovers import temporary
from ..reading import open_regular, read_text, sha256
from .json_lines import MOST_LINE_BYTES, JsonLines
from .row_format import Row
from .sources import Listed

TEXT_SUFFIXES = (".txt", ".md")
_VERSION = 2  # of the copies
_DAYS = 30  # after which an unused copy is removed
_MOST_GROWTH, _ALWAYS = 200, 64 << 20  # of what gzip unpacks: times its size, and bytes beside that
_BLOCK_BYTES = 1 << 20
_PIECE = 4000  # characters of a row of text, about a thousand tokens, where paragraphs allow that
_MOST_TEXT_BYTES = 1 << 30
_QUOTED = re.compile(r'"([^"]*(?:""[^"]*)*)"')  # a cell in quotes; those within it are doubled


class Copy(JsonLines):
    """The JSONL copy of a file, which is named by the hash of that."""

    def __init__(self, copy: Path, original: Path | str) -> None:
        super().__init__(copy)
        self._original = original

    def _status(self, f: BinaryIO) -> tuple[int, ...]:
        """Return the size: every use of a copy changes its time, and its content stays."""
        return (os.fstat(f.fileno()).st_size,)


class Unpacked(Copy):
    """A JSONL file that was packed; rows are named by the file that people have."""

    def where(self, i: int) -> str:
        """Return file and line of a row."""
        return f"{self._original}:{super().where(i).rpartition(':')[2]}"


class Table(Copy):
    """The rows of a table."""

    def where(self, i: int) -> str:
        """Return file and number of a row; the header is none."""
        return f"{self._original}[{i}]"


def gzip_rows(file: Path) -> Unpacked:
    """Return the rows of a .jsonl.gz file."""
    return Unpacked(_copy(file, "jsonl", lambda out: _unpack(file, out)), file)


def table_rows(file: Path) -> Table:
    """Return the rows of a .csv or .tsv file, packed or not; the first line names the columns."""
    is_tsv = ".tsv" in Path(file.name.lower()).suffixes[-2:]
    kind, rows_of = ("tsv", _tsv_rows) if is_tsv else ("csv", _csv_rows)
    return Table(_copy(file, kind, lambda out: _tabulate(file, rows_of(file), out)), file)


def text_rows(file: Path) -> Listed:
    """Return the paragraphs of a text, so many in a row as have some 4,000 characters."""
    rows, begun, start, number = [], [], 1, 0
    text = read_text(file, _MOST_TEXT_BYTES).replace("\r\n", "\n")
    for paragraph in text.split("\n\n"):
        if begun and sum(map(len, begun)) + len(paragraph) > _PIECE:
            rows.append(_text_row(file, start, begun))
            begun, start = [], number + 1
        begun.append(paragraph)
        number += paragraph.count("\n") + 2
    rows.append(_text_row(file, start, begun))
    return Listed([row for row in rows if row.value["text"]])


def _text_row(file: Path, line: int, paragraphs: list[str]) -> Row:
    return Row(f"{file}:{line}", {"text": "\n\n".join(paragraphs).strip()})


def _copy(file: Path, kind: str, write: Callable[[BinaryIO], None]) -> Path:
    """Return the JSONL copy of a file, made if the cache does not have it."""
    folder = cache_folder("rows") or Path(tempfile.gettempdir()) / f"mlx_packs-{os.getuid()}"
    copy = folder / f"{sha256(file)}-{kind.encode().hex()}-{_VERSION}.jsonl"
    if copy.is_file():
        os.utime(copy)
        return copy
    with write_errors(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # rows may be private
        remove_unused(folder, "*.jsonl", _DAYS)
        with temporary(copy, Path.touch) as partial:
            with partial.open("wb") as out:
                write(out)
            replace_file(partial, copy)
    return copy


def _blocks(file: Path) -> Iterator[bytes]:
    """Yield the content of a file; of a packed one what is in it, up to a limit."""
    limit = _MOST_GROWTH * file.stat().st_size + _ALWAYS
    room = free_bytes(cache_folder("rows") or Path(tempfile.gettempdir()))
    limit = limit if room is None else min(limit, room // 2)
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


def _unpack(file: Path, out: BinaryIO) -> None:
    for block in _blocks(file):
        out.write(block)


_Cells = tuple[int, list[str]]  # of a row of a table, and the line that it begins in


def _tabulate(file: Path, rows: Iterator[_Cells], out: BinaryIO) -> None:
    """Write each row of a table as a JSON object of texts; the first one names the columns."""
    _, names = next(rows, (1, []))
    header = [name.strip() for name in names]
    if len(set(header)) != len(header) or "" in header:
        raise PackError(
            f"{file}:1: must name every column, each once, but has {header!r:.80}.", "data"
        )
    for line, cells in rows:
        if not cells:
            continue
        if len(cells) != len(header):
            raise PackError(
                f"{file}:{line}: has {len(cells)} cells, but the header has {len(header)}. Cells with "
                "commas, tabs or line breaks in them must be in quotes, in a .csv file.",
                "data",
            )
        row = dict(zip(header, cells, strict=True))
        out.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")


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
            f"{file}:{line}: the row that begins here cannot be read to its end ({error}). A cell that "
            "begins with a quote must end with one; double the quotes within it.",
            "unreadable",
        ) from None


def _tsv_rows(file: Path) -> Iterator[_Cells]:
    """Yield the rows of a .tsv file, each a line; a cell that is quoted as a whole is unquoted.

    Other quotes are a part of the text: most programs that write .tsv quote nothing.
    """
    for number, line in enumerate(_lines(file), 1):
        cells = line.rstrip("\r\n").split("\t")
        yield number, [] if cells == [""] else [_unquoted(cell) for cell in cells]


def _unquoted(cell: str) -> str:
    """Return a cell without quotes around it."""
    quoted = _QUOTED.fullmatch(cell)
    return quoted[1].replace('""', '"') if quoted else cell


def _lines(file: Path) -> Iterator[str]:
    """Yield the lines of a text file with their ends."""
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
