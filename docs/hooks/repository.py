"""Pages of the site that are elsewhere in the repository, and the links between all pages.

Links in Markdown files are those of the repository, so that they also work where the files are
read without the site. Here they become links of the site; a link to a file that the site does not
have becomes its text. A link to a notebook becomes one to its page.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
PAGES = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks/README.md",
    "benchmarks/guides.md",
    "examples/README.md",
    "examples/coming_from_mlx_lm.md",
    "examples/embedding.md",
    "examples/recipes/README.md",
    "kernels/README.md",
    "runbook.md",
)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)\)")
_FENCE = re.compile(r"^(?:```.*?^```|~~~.*?^~~~)$", re.DOTALL | re.MULTILINE)
_EXTERNAL = re.compile(r"[a-z]+:|#")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    for page in PAGES:
        files.append(File.generated(config, page, abs_src_path=str(ROOT / page)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return a page with links of the site, outside its blocks of code."""
    pieces, start = [], 0
    for fence in _FENCE.finditer(markdown):
        pieces += [_of_the_site(markdown[start : fence.start()], page, files), fence.group()]
        start = fence.end()
    return "".join([*pieces, _of_the_site(markdown[start:], page, files)])


def _of_the_site(text: str, page: Page, files: Files) -> str:
    source = page.file.src_uri
    in_docs = f"docs/{source}"
    place = posixpath.dirname(in_docs if (ROOT / in_docs).is_file() else source)

    def link(match: re.Match) -> str:
        mark, label, target = match.groups()
        if _EXTERNAL.match(target):
            return match.group()
        path, _, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(place, path))
        path = "index.md" if path == "README.md" else path.removeprefix("docs/")
        path = re.sub(r"\.ipynb$", ".md", path)  # its page, by notebooks.py
        if files.get_file_from_path(path) is None:
            return label
        relative = posixpath.relpath(path, posixpath.dirname(source) or ".")
        return f"{mark}[{label}]({relative}{'#' * bool(anchor)}{anchor})"

    return _LINK.sub(link, text)
