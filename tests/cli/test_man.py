"""The manual pages in docs/man: as their script writes them, with every flag, ready to be copied."""

import os
import re
import shutil
import subprocess
import sys

import click
import pytest

from mlx_packs.cli.main import packs
from tests.helpers.documents import ROOT

PAGES = ROOT / "docs" / "man"
COMMANDS = packs.list_commands(click.Context(packs))
MACROS = {".TH", ".SH", ".SS", ".TP", ".PP", ".B", ".RS", ".RE", ".nf", ".fi", ".nh", ".ad"}


def printed(page: str) -> str:
    """The text of a page without its fonts, its special characters as a terminal shows them."""
    text = re.sub(r"\\f[BIPR]|\\&", "", page).replace(r"\~", " ").replace(r"\-", "-")
    for name, character in {"aq": "'", "ga": "`", "ha": "^", "ti": "~"}.items():
        text = text.replace(rf"\({name}", character)
    return text.replace(r"\e", "\\")


def test_pages_are_those_of_their_script(tmp_path):
    shutil.copy(PAGES / "pages.py", tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, tmp_path / "pages.py"], check=True, env=environment)
    written = {file.name: file.read_text("utf-8") for file in (tmp_path / "man1").iterdir()}
    assert written == {file.name: file.read_text("utf-8") for file in (PAGES / "man1").iterdir()}, (
        "run python docs/man/pages.py"
    )
    assert set(written) == {"packs.1", *(f"packs-{name}.1" for name in COMMANDS)}


@pytest.mark.parametrize("name", COMMANDS)
def test_page_of_a_command_has_its_flags_and_examples_as_they_are_typed(name):
    command = packs.get_command(click.Context(packs), name)
    page = (PAGES / "man1" / f"packs-{name}.1").read_text("utf-8")
    lines = printed(page).splitlines()
    terms = " ".join(
        after for before, after in zip(lines, lines[1:], strict=False) if before == ".TP"
    )
    for option in command.params:
        if isinstance(option, click.Option):
            assert set(option.opts) <= set(re.findall(r"-[\w-]+", terms))
    examples = re.findall(r"^    (packs .*)", command.epilog or "", re.M)
    assert set(examples) <= set(lines)
    assert {line.split()[0] for line in page.splitlines() if line.startswith((".", "'"))} <= MACROS
