"""The documentation site (`pip install 'mlx-packs[docs]'`): builds without a warning, and offline."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mlx_packs
from mlx_packs.cli.main import COMMANDS
from mlx_packs.cli.options import SETTINGS
from tests.helpers.documents import DOCUMENTS, ROOT, parse
from tests.helpers.notebooks import NOTEBOOKS

pytestmark = pytest.mark.interop


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The folder of the site; warnings fail its build, those about links and anchors too."""
    folder = tmp_path_factory.mktemp("site")
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0 and "WARNING" not in result.stderr, result.stderr
    return folder


def html(site: Path, page: str) -> str:
    return (site / page).read_text(encoding="utf-8")


def test_pages_have_every_command_option_and_key(site):
    anchors = {
        "reference/commands.html": [
            f"packs-{name}" for names in COMMANDS.values() for name in names
        ],
        "reference/python.html": [name.lower() for name in mlx_packs.__all__],
        "reference/settings.html": [
            *SETTINGS,
            "phases",
            "hf_dataset",
            "optimizer_config",
            "phases-replay",
        ],
    }

    anchors["reference/commands.html"] += [f"train-{name.replace('_', '-')}" for name in SETTINGS]
    for page, names in anchors.items():
        text = html(site, page)
        assert [name for name in names if f'id="{name}"' not in text] == [], page


def test_pages_load_nothing_from_elsewhere(site):
    loaded = re.compile(
        r'<(?:script|img|iframe|link rel="stylesheet")[^>]*(?:src|href)="(?:https?:)?//'
    )
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    assert not [page for page in pages if loaded.search(page.read_text(encoding="utf-8"))]


def test_notebooks_have_a_page_with_code_outputs_and_plots(site):
    for notebook in NOTEBOOKS:
        page = html(site, f"examples/{notebook.stem}.html")
        assert page.count('<div class="highlight">') >= 8 and f'href="{notebook.name}"' in page
        assert (site / "examples" / notebook.name).is_file() and "\x1b[" not in page
        if notebook.stem != "own_layers":
            image = re.search(r'<img [^>]*src="([^"]+\.png)"', page.partition("<article")[2])[1]
            assert (site / "examples" / image).is_file()
    assert 'href="your_data.html"' in html(site, "examples/quick_start.html")


def test_lists_and_tables_are_those_of_the_markdown_files(site):
    """Python-Markdown wants an empty line before a list where CommonMark does not."""
    differences = []
    for document in DOCUMENTS:
        page = document.removeprefix("docs/").removesuffix(".md").replace("README", "index")
        if document == "README.md" or not (site / f"{page}.html").is_file():
            continue
        source = parse(document, (ROOT / document).read_text(encoding="utf-8"))
        if source.anchors() is None:
            continue  # more of it is generated

        written = html(site, f"{page}.html").partition("<article")[2].partition("</article>")[0]
        for tag in ("li", "table", "h2", "h3"):
            expected = sum(
                token.type.endswith("_open") and token.tag == tag for token in source.tokens
            )
            if len(re.findall(rf"<{tag}[ >]", written)) != expected:
                differences.append((document, tag, expected))

    assert not differences
