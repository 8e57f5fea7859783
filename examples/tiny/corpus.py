"""Texts for the tiny base: read from Debian packages and the running Python, as plain text.

Every source may be used, changed and shipped: public domain, PSF, PostgreSQL licence. A source is a
function that yields documents; a document is one page, chapter, entry or module. Nothing is
downloaded: packages are read where they are installed (``/``) or below a folder into which they
were unpacked with ``dpkg-deb -x``.
"""

import ast
import gzip
import html.parser
import inspect
import random
import re
import struct
import subprocess
import sysconfig
import textwrap
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

DOCS = "usr/share/doc"
SKIPPED_MODULES = {"test", "tests", "idlelib", "lib2to3", "encodings", "turtledemo", "pydoc_data"}
SKIPPED_MODULES |= {"site-packages", "dist-packages", "ensurepip", "__pycache__"}

# Directives of reStructuredText whose argument is worth keeping as a line of its own.
SIGNATURES = (
    "function|class|method|data|attribute|exception|decorator|staticmethod|classmethod|option"
    "|opcode|describe|cmdoption|envvar|c:function|c:macro|c:type|c:var"
)


@dataclass(frozen=True)
class Document:
    """One text, its source (such as ``python-doc``) and a name that is unique in the source."""

    source: str
    name: str
    text: str


def find(path: str, package: str, roots: list[Path]) -> Path:
    """The first existing ``root/path``; ends the program, naming the package, if there is none."""
    for root in roots:
        if (root / path).exists():
            return root / path
    raise SystemExit(
        f"make_base: {path} is missing: apt-get install {package} (or unpack it below --texts)"
    )


def unwrap(text: str) -> str:
    """Join the lines of each prose paragraph; keep code, examples and lists line by line."""
    blocks: list[str] = []
    # Indent of the paragraph that ended in "::"; what is indented deeper is code.
    opened: int | None = None
    for block in re.split(r"\n\s*\n", text.expandtabs(4)):
        lines = [line.rstrip() for line in block.splitlines() if line.strip()]
        if not lines:
            continue
        indent = len(lines[0]) - len(lines[0].lstrip())
        if opened is not None and indent <= opened:
            opened = None
        if opened is not None or lines[0].lstrip().startswith((">>>", "$ ")):
            blocks.append(textwrap.dedent("\n".join(lines)))
            continue
        body = re.sub(
            r" ([*•]|#\.|\d\.) (?=\w)", r"\n\1 ", " ".join(line.strip() for line in lines)
        )
        if body.endswith("::"):
            opened = indent
            body = body[:-1] if body[:-2].rstrip() == body[:-2] else body[:-2].rstrip()
        if body.strip(": "):
            blocks.append(body)
    return "\n\n".join(blocks)


def rst_to_text(text: str) -> str:
    """Plain text of a reStructuredText page: roles, directives, tables and markup removed."""
    text = re.sub(r"\\\n\s*", "", text)
    text = re.sub(
        r"(?m)^( *)\.\. (?:code-block|sourcecode|doctest|testcode|productionlist)::.*$",
        r"\1::",
        text,
    )
    text = re.sub(r"(?m)^ *\.\. (?:note|warning|seealso|tip|impl-detail)::", "", text)
    text = re.sub(r"(?m)^ *\.\. versionadded:: *(\S+)", r"New in version \1.", text)
    text = re.sub(r"(?m)^ *\.\. versionchanged:: *(\S+)", r"Changed in version \1.", text)
    text = re.sub(rf"(?m)^ *\.\. (?:{SIGNATURES}):: *(.*)$", r"\n\1\n", text)
    text = re.sub(r"(?m)^( *)\.\. .*(?:\n\1 +\S.*)*", "", text)
    text = re.sub(r"(?m)^ *:[\w-]+:(?: .*)?$| \[#\w*\]_", "", text)
    text = re.sub(r"(?m)^ *([=\-~^*\"'#.+|])(?:[ \1+|=-]*\1){3,} *$", "", text)
    text = re.sub(r":[\w:+-]+:`!?~?([^`<]*?)(?:\s*<[^`>]*>)?`", r"\1", text)
    text = re.sub(r"`([^`<]+?)\s*<[^`>]+>`__?", r"\1", text)
    text = re.sub(r"``?([^`]+)``?_?", r"\1", text)
    text = re.sub(r"\*\*?([^*\s][^*\n]*)\*\*?", r"\1", text)
    text = re.sub(r"\|(\w+)\|", r"\1", text)
    return unwrap(text)


class PageText(html.parser.HTMLParser):
    """Collects the visible text of an HTML page, one blank line between block elements."""

    BLOCKS = {
        "p",
        "div",
        "li",
        "tr",
        "td",
        "th",
        "dt",
        "dd",
        "h1",
        "h2",
        "h3",
        "h4",
        "table",
        "ul",
        "ol",
        "br",
        "pre",
    }
    HIDDEN = {"script", "style", "head", "svg", "nav", "button", "form"}

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.hidden, self.in_pre = 0, False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.hidden += tag in self.HIDDEN
        self.in_pre = self.in_pre or tag == "pre"
        if tag in self.BLOCKS:
            self.parts.append("\n\n")

    def handle_endtag(self, tag: str) -> None:
        self.hidden = max(0, self.hidden - (tag in self.HIDDEN))
        self.in_pre = self.in_pre and tag != "pre"
        if tag in self.BLOCKS:
            self.parts.append("\n\n")

    def handle_data(self, data: str) -> None:
        if not self.hidden:
            self.parts.append(data if self.in_pre else re.sub(r"\s+", " ", data))


def html_to_text(page: str) -> str:
    """Plain text of an HTML page; paragraphs are separated by one blank line."""
    parser = PageText()
    parser.feed(page)
    text = "".join(parser.parts).replace("\xa0", " ")
    blocks = (block.strip(" ").rstrip() for block in re.split(r"\n\s*\n", text))
    return "\n\n".join(block for block in blocks if block.strip())


def python_docs(roots: list[Path]) -> Iterator[Document]:
    """Python's documentation (PSF licence)."""
    folder = find(f"{DOCS}/python3.11/html/_sources", "python3.11-doc", roots)
    for path in sorted(folder.rglob("*.rst.txt")):
        name = path.relative_to(folder).as_posix()
        yield Document("python-doc", name, rst_to_text(path.read_text(encoding="utf-8")))


def stdlib_files() -> list[tuple[str, str]]:
    """(module name, source) of the running Python's standard library, without tests and tables."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        if not SKIPPED_MODULES & set(parts) and not any(part.startswith("test_") for part in parts):
            files.append((".".join(parts), path.read_text(encoding="utf-8", errors="replace")))
    return files


def docstrings(module: str, source: str) -> list[tuple[str, str]]:
    """(qualified name, docstring) of the module, its classes and its functions."""
    named = []

    def visit(node: ast.AST, name: str) -> None:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            doc = ast.get_docstring(node)
            if doc and len(doc) > 40:
                named.append((name, doc))
            for child in node.body:
                visit(child, f"{name}.{getattr(child, 'name', '')}")

    visit(ast.parse(source), module)
    return named


def stdlib_docstrings(roots: list[Path]) -> Iterator[Document]:
    """Docstrings of the standard library as prose (PSF licence)."""
    for module, source in stdlib_files():
        entries = [
            f"{name}\n\n{unwrap(inspect.cleandoc(doc))}" for name, doc in docstrings(module, source)
        ]
        if entries:
            yield Document("stdlib-docstrings", module, "\n\n".join(entries))


def stdlib_code(roots: list[Path]) -> Iterator[Document]:
    """Source files of the standard library (PSF licence)."""
    for module, source in stdlib_files():
        if 400 < len(source) < 120_000:
            yield Document("stdlib-code", module, source)


def jargon_entries(roots: list[Path]) -> list[tuple[str, str]]:
    """(headword, text) of each entry of the Jargon File."""
    raw = (
        gzip.open(find("usr/share/dictd/jargon.dict.dz", "dict-jargon", roots))
        .read()
        .decode("utf-8")
    )
    entries = []
    for block in re.split(r"\n(?=\S)", raw):
        head, _, body = block.partition("\n")
        body = re.sub(r"\{\s*([^{}]*?)\s*\}", r"\1", body)
        body = re.sub(r"(?m)^ /[^\n]*/(, [\w. ]+)?$|^ \w+\.$", "", body, count=1)
        if len(body) > 80 and "00-database" not in head:
            entries.append((head.strip(), unwrap(body).strip()))
    return entries


def jargon(roots: list[Path]) -> Iterator[Document]:
    """The Jargon File 4.4.7 (public domain)."""
    for number, (head, body) in enumerate(jargon_entries(roots)):
        yield Document("jargon", f"{number}:{head}", f"{head}\n\n{body}")


def devil_entries(roots: list[Path]) -> list[tuple[str, str]]:
    """(headword, definition) of each entry of The Devil's Dictionary."""
    raw = (
        gzip.open(find("usr/share/dictd/devil.dict.dz", "dict-devil", roots))
        .read()
        .decode("utf-8", "replace")
    )
    entries = []
    for block in re.split(r"\n(?=[A-Z][A-Z'-]+[,.])", raw)[1:]:
        head = re.match(r"[A-Z'-]+", block)
        if head and len(block) < 12_000:
            entries.append((head.group(), unwrap(block)))
    return entries


def devil(roots: list[Path]) -> Iterator[Document]:
    """Ambrose Bierce, The Devil's Dictionary, 1911 (public domain)."""
    for number, (head, body) in enumerate(devil_entries(roots)):
        yield Document("devil", f"{number}:{head}", body)


def austen(roots: list[Path]) -> Iterator[Document]:
    """Jane Austen's six novels (public domain), one document a chapter."""
    path = "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
    data = find(path, "r-cran-janeaustenr", roots).read_bytes()
    start = 0
    while start < len(data):
        unpacker = zlib.decompressobj()
        raw = unpacker.decompress(data[start + 4 :])
        start = len(data) - len(unpacker.unused_data)
        kind, count = struct.unpack(">2i", raw[23:31])  # R's serialization: 23 bytes of header
        if kind != 16 or count < 1000:  # 16: a vector of strings, here the lines of one novel
            continue
        lines, at = [], 31
        for _ in range(count):
            size = struct.unpack(">i", raw[at + 4 : at + 8])[0]
            lines.append(raw[at + 8 : at + 8 + size].decode("utf-8", "replace"))
            at += 8 + size
        for number, chapter in enumerate(re.split(r"\n(?=(?:CHAPTER|Chapter) )", "\n".join(lines))):
            yield Document("austen", f"{lines[0]} {number}", unwrap(chapter.replace("_", "")))


def sawyer(roots: list[Path]) -> Iterator[Document]:
    """Mark Twain, The Adventures of Tom Sawyer (public domain), one document a chapter."""
    path = "usr/share/gocode/src/github.com/klauspost/compress/testdata/Mark.Twain-Tom.Sawyer.txt"
    text = find(path, "golang-github-klauspost-compress-dev", roots).read_text(
        encoding="utf-8", errors="replace"
    )
    text = text[text.index("P R E F A C E") : text.rindex("CONCLUSION")].replace("_", "")
    for number, chapter in enumerate(re.split(r"\n(?=CHAPTER )", text)):
        yield Document("sawyer", str(number), unwrap(chapter.replace("--", " -- ")))


def sqlite(roots: list[Path]) -> Iterator[Document]:
    """The documentation of SQLite (public domain)."""
    folder = find(f"{DOCS}/sqlite3/about.html", "sqlite3-doc", roots).parent
    for path in sorted(folder.rglob("*.html")):
        name = path.relative_to(folder).as_posix()
        if not name.startswith(
            ("matrix", "syntax/", "releaselog/", "doc_", "requirements", "capi3ref", "sitemap")
        ):
            text = html_to_text(path.read_text(encoding="utf-8", errors="replace"))
            contents = re.compile(
                r"(\d+\.)+ .{,70}$"
            )  # headings and their copies in the table of contents
            text = "\n\n".join(block for block in text.split("\n\n") if not contents.match(block))
            yield Document("sqlite", name, text)


def postgresql(roots: list[Path]) -> Iterator[Document]:
    """The documentation of PostgreSQL 15 (PostgreSQL licence)."""
    folder = find(f"{DOCS}/postgresql-doc-15/html", "postgresql-doc-15", roots)
    for path in sorted(folder.glob("*.html")):
        if not path.name.startswith(
            ("release", "bookindex", "biblio", "features", "errcodes", "index")
        ):
            page = path.read_text(encoding="utf-8", errors="replace")
            yield Document("postgresql", path.name, html_to_text(page))


SOURCES = (
    python_docs,
    stdlib_docstrings,
    stdlib_code,
    jargon,
    devil,
    austen,
    sawyer,
    sqlite,
    postgresql,
)


def kjv_verses() -> list[tuple[str, int, int, str]]:
    """(book, chapter, verse, text) of the King James Bible, as the program ``bible`` prints it."""
    try:
        shown = subprocess.run(
            ["bible", "-f", "Gen1:1-Rev22:21"], capture_output=True, text=True, check=True
        ).stdout
    except FileNotFoundError:
        raise SystemExit(
            "The program bible is missing: apt-get install bible-kjv bible-kjv-text"
        ) from None
    verses = []
    for line in shown.splitlines():
        match = re.match(r"(\d?\s?[A-Za-z]+?)\s?(\d+):(\d+) (.*)", line)
        if match:
            book, chapter, verse, text = match.groups()
            verses.append((book, int(chapter), int(verse), text.strip()))
    return verses


def word_runs(text: str, length: int) -> set[tuple[str, ...]]:
    """All sequences of ``length`` lower-case words in the text."""
    words = re.findall(r"[a-z']+", text.lower())
    return {tuple(words[i : i + length]) for i in range(len(words) - length + 1)}


def without_kjv(documents: list[Document], length: int = 7) -> tuple[list[Document], int]:
    """Drop every paragraph that shares ``length`` words in a row with the King James Bible.

    Returns the documents and the number of dropped paragraphs.
    """
    known = word_runs(" ".join(verse[3] for verse in kjv_verses()), length)
    dropped, kept = 0, []
    for document in documents:
        if document.source == "stdlib-code":
            kept.append(document)
            continue
        paragraphs = document.text.split("\n\n")
        good = [paragraph for paragraph in paragraphs if not (word_runs(paragraph, length) & known)]
        dropped += len(paragraphs) - len(good)
        kept.append(replace(document, text="\n\n".join(good)))
    return kept, dropped


def without_boilerplate(documents: list[Document], limit: int = 12) -> list[Document]:
    """Drop paragraphs that more than ``limit`` documents of one source share (menus, footers)."""
    seen = Counter((d.source, p) for d in documents for p in set(d.text.split("\n\n")))
    cleaned = []
    for d in documents:
        kept = [
            p
            for p in d.text.split("\n\n")
            if d.source == "stdlib-code" or seen[d.source, p] <= limit
        ]
        cleaned.append(replace(d, text="\n\n".join(kept)))
    return cleaned


def prose_of(document: Document) -> list[list[str]]:
    """Paragraphs of plain prose, each as its list of sentences."""
    paragraphs = []
    for paragraph in document.text.split("\n\n"):
        if (
            "\n" not in paragraph
            and len(paragraph) > 120
            and not paragraph.startswith((">>>", "$"))
        ):
            paragraphs.append(re.split(r"(?<=[.!?])\s+(?=[A-Z])", paragraph))
    return paragraphs


def read_corpus(roots: list[Path], code_share: float = 0.2, seed: int = 0) -> list[Document]:
    """All documents, cleaned; code is cut to ``code_share`` of the characters. Deterministic."""
    documents = [document for source in SOURCES for document in source(roots)]
    documents = [d for d in without_boilerplate(documents) if len(d.text) > 100]
    documents, dropped = without_kjv(documents)
    print(f"corpus: dropped {dropped} paragraphs that share 7 words in a row with the KJV Bible")
    prose = [d for d in documents if d.source != "stdlib-code"]
    code = [d for d in documents if d.source == "stdlib-code"]
    random.Random(seed).shuffle(code)
    allowed = code_share / (1 - code_share) * sum(len(d.text) for d in prose)
    while sum(len(d.text) for d in code) > allowed:
        code.pop()
    return [d for d in prose + code if len(d.text) > 100]
