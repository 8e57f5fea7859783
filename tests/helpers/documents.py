"""The Markdown files of the repository: their links, headings and blocks of code."""

import posixpath
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]
FOLDERS = (".", "docs", "examples", "examples/images", "examples/tiny", "benchmarks", "kernels")
DOCUMENTS = sorted(
    file.relative_to(ROOT).as_posix() for folder in FOLDERS for file in ROOT.glob(f"{folder}/*.md")
)
# The documents that tell users what to type.
GUIDES = [d for d in DOCUMENTS if d == "README.md" or d.startswith(("docs/", "examples/"))]
_GENERATED = re.compile(r"^<!-- generated: ", re.MULTILINE)


@dataclass
class Document:
    """A file and what is in it."""

    path: str  # from the root of the repository
    tokens: list[Token] = field(repr=False)
    text: str = field(repr=False)

    def links(self) -> Iterator[str]:
        """The targets of links and images."""
        for token in _flat(self.tokens):
            if target := token.attrGet("href") or token.attrGet("src"):
                yield str(target)

    def anchors(self) -> set[str] | None:
        """The anchors that GitHub gives its headings; None if the site generates more."""
        if _GENERATED.search(self.text):
            return None
        pairs = zip(self.tokens, self.tokens[1:], strict=False)
        return {_slug(inline.content) for token, inline in pairs if token.type == "heading_open"}

    def blocks(self, *languages: str) -> Iterator[tuple[str, str]]:
        """Language and text of its blocks of code in these languages."""
        for token in self.tokens:
            if token.type == "fence" and token.info.strip() in languages:
                yield token.info.strip(), token.content

    def target(self, link: str) -> str:
        """The path that a relative link names, from the root of the repository."""
        return posixpath.normpath(posixpath.join(posixpath.dirname(self.path), link))


@cache
def read(path: str) -> Document:
    """Read a document by its path from the root of the repository."""
    return parse(path, (ROOT / path).read_text(encoding="utf-8"))


def parse(path: str, text: str) -> Document:
    """Parse a document that has, or might have, this path."""
    return Document(path, MarkdownIt("commonmark").enable("table").parse(text), text)


def broken_links(page: Document) -> list[str]:
    """Relative links of a document to a file or a heading that is not there."""
    broken = []
    for link in page.links():
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue

        target = page.target(path) if path else page.path
        if not (ROOT / target).exists():
            broken.append(link)
        elif anchor and target.endswith(".md"):
            anchors = read(target).anchors()
            if anchors is not None and anchor not in anchors:
                broken.append(link)

    return broken


def _flat(tokens: list[Token]) -> Iterator[Token]:
    for token in tokens:
        yield token
        yield from _flat(token.children or [])


def _slug(heading: str) -> str:
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def commands(block: str) -> Iterator[list[str]]:
    """The arguments of each call of `packs` in a block of shell commands."""
    lines = block.replace("\\\n", " ").splitlines()
    for line in lines:
        for part in _parts(shlex.split(line, comments=True)):
            if part and part[0].rpartition("/")[2] == "packs":
                yield part[1:]


def _parts(words: list[str]) -> Iterator[list[str]]:
    part: list[str] = []
    for word in words:
        if word in ("&&", "|", "||"):
            yield part
            part = []
        else:
            part.append(word)
    yield part
