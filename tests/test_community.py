"""Files for people who come to the repository: issue forms, citation."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import mlx_packs
from mlx_packs.cli.main import COMMANDS

ROOT = Path(__file__).parents[1]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
PROJECT = (ROOT / "pyproject.toml").read_text("utf-8")
REPOSITORY = re.search(r'^Repository = "(.+)"', PROJECT, re.M).group(1)
PAGES = (*FORMS, ROOT / "CITATION.cff", ROOT / "CODE_OF_CONDUCT.md", ROOT / "README.md")


def check_schema(name: str, files: list[Path]) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{name}"]
    result = subprocess.run([*command, *files], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.interop
def test_forms_and_citation_are_valid_by_their_schemas():
    config = ROOT / ".github" / "ISSUE_TEMPLATE" / "config.yml"
    check_schema("github-issue-forms", [file for file in FORMS if file != config])
    check_schema("github-issue-config", [config])
    check_schema("citation-file-format", [ROOT / "CITATION.cff"])


def test_forms_name_commands_that_exist():
    texts = [file.read_text("utf-8") for file in FORMS]
    named = {name for text in texts for name in re.findall(r"\bpacks ([a-z-]+)", text)}
    assert {"doctor", "train", "bench"} <= named
    assert named <= {name for names in COMMANDS.values() for name in names}


def test_addresses_are_of_the_one_repository_and_its_files_exist():
    texts = [file.read_text("utf-8") for file in PAGES]
    found = [each for text in texts for each in re.findall(r"https://github\.com/[\w./-]+", text)]
    assert len(found) >= 5
    for address in (each.rstrip(".") for each in found):
        assert address.startswith(REPOSITORY), address
        _, is_file, path = address.partition("/blob/main/")
        assert not is_file or (ROOT / path).is_file(), address


def test_citation_has_version_licence_and_title_of_the_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["version"] == mlx_packs.__version__
    assert f'license = "{citation["license"]}"' in PROJECT
    assert citation["authors"] == [{"name": "mlx-packs contributors"}]
    assert citation["repository-code"] == REPOSITORY
