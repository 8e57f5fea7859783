"""The manual pages in docs/man: as their script writes them."""

import os
import shutil
import subprocess
import sys

import click

from mlx_packs.cli.main import packs
from tests.helpers.documents import ROOT

PAGES = ROOT / "docs" / "man"
COMMANDS = packs.list_commands(click.Context(packs))
MACROS = {".TH", ".SH", ".SS", ".TP", ".PP", ".B", ".RS", ".RE", ".nf", ".fi", ".nh", ".ad"}


def test_pages_are_those_of_their_script(tmp_path):
    shutil.copy(PAGES / "pages.py", tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, tmp_path / "pages.py"], check=True, env=environment)
    written = {file.name: file.read_text("utf-8") for file in (tmp_path / "man1").iterdir()}
    assert written == {file.name: file.read_text("utf-8") for file in (PAGES / "man1").iterdir()}, (
        "run python docs/man/pages.py"
    )
    assert set(written) == {"packs.1", *(f"packs-{name}.1" for name in COMMANDS)}
    lines = [line for page in written.values() for line in page.splitlines()]
    assert {line.split()[0] for line in lines if line.startswith((".", "'"))} <= MACROS
