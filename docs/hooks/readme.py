"""Sections of the README that a page of docs/ shows, so that they are written once.

A page has ``<!-- generated: README, Quick start -->`` in the place of a section.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
_MARKER = re.compile(r"<!-- generated: README, (.+?) -->")
_LINK = re.compile(r"\]\((?![a-z]+:|#)")  # a relative one


def section(heading: str) -> str:
    """Return a section of the README with its heading, and links as a page of docs/ has them."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    match = re.search(rf"^## {re.escape(heading)}\n.*?(?=^## |\Z)", readme, re.M | re.S)
    if match is None:
        raise ValueError(f"README.md: has no section '{heading}', which a page of docs/ shows.")
    return _LINK.sub("](../", match.group().rstrip())


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return a page with the sections that it names."""
    return _MARKER.sub(lambda marker: section(marker.group(1)), markdown)
