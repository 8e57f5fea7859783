"""The documentation site (`pip install 'mlx-packs[docs]'`): builds without a warning, and offline."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_packs.cli.main import COMMANDS
from mlx_packs.cli.options import SETTINGS
from tests.helpers.documents import DOCUMENTS, ROOT, parse
from tests.helpers.notebooks import NOTEBOOKS

pytestmark = pytest.mark.interop


def build(folder: Path, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess:
    """Build the site into a folder; warnings fail, those about links and anchors too."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", config, "-d", folder]
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    result = build(folder)
    assert result.returncode == 0 and "WARNING" not in result.stderr, result.stderr
    return folder


def html(site: Path, page: str) -> str:
    return (site / page).read_text(encoding="utf-8")


def test_command_page_has_every_command_and_option_of_training(site):
    page = html(site, "cli.html")
    assert all(f'id="packs-{name}"' in page for names in COMMANDS.values() for name in names)
    flags = {name: f'id="train-{name.replace("_", "-")}"' for name in SETTINGS}
    assert [name for name, anchor in flags.items() if anchor not in page] == []


def test_configuration_page_has_every_key(site):
    page = html(site, "config.html")
    keys = [*SETTINGS, "phases", "hf_dataset", "optimizer_config", "phases-replay"]
    assert [key for key in keys if f'id="{key}"' not in page] == []


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


def test_a_broken_link_or_anchor_fails_the_build(tmp_path):
    pages = tmp_path / "docs"
    pages.mkdir()
    (pages / "index.md").write_text("# A\n\n[b](b.md#nothing) [c](c.md)\n")
    (pages / "b.md").write_text("# B\n")
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    kept = settings[settings.index("validation:") : settings.index("nav:\n  - Get")]
    config = tmp_path / "mkdocs.yml"
    config.write_text(f"site_name: x\n{kept}nav: [index.md, b.md]\n")
    result = build(tmp_path / "site", config)
    assert result.returncode == 1 and "#nothing" in result.stderr and "c.md" in result.stderr
