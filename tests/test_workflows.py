"""The files in .github/workflows: valid by GitHub's schema, pinned, and of commands that exist."""

import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
import yaml

from mlx_packs.cli.main import packs

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
# The branch that the action's own documentation names.
MOVING = {"pypa/gh-action-pypi-publish@release/v1"}


def steps_of(file: Path) -> list[dict]:
    jobs = yaml.safe_load(file.read_text(encoding="utf-8"))["jobs"].values()
    return [step for job in jobs for step in job.get("steps", [])]


def violations(*files: Path) -> str:
    """What GitHub's schema of workflows rejects in files; empty without a fault."""
    command = ["check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    result = subprocess.run(
        [sys.executable, "-m", *command, *files], capture_output=True, text=True, check=False
    )
    return "" if result.returncode == 0 else result.stdout + result.stderr


@pytest.mark.interop
def test_workflows_are_valid_by_the_schema_of_github(tmp_path):
    assert len(WORKFLOWS) == 4 and not violations(*WORKFLOWS)
    broken = tmp_path / "broken.yml"
    broken.write_text(WORKFLOWS[0].read_text().replace("runs-on:", "run-on:"))
    assert "run-on" in violations(broken)


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_actions_are_pinned_and_permissions_are_few(file):
    text = file.read_text(encoding="utf-8")
    used = re.findall(r"uses: (\S+)", text)
    assert (
        used
        and not {
            name
            for name in used
            if not re.search(r"@[0-9a-f]{40}$", name) and not name.startswith("./")
        }
        - MOVING
    )
    assert yaml.safe_load(text)["permissions"] == {"contents": "read"}
    assert all(
        step["with"]["persist-credentials"] is False
        for step in steps_of(file)
        if step.get("uses", "").startswith("actions/checkout@")
    )


def test_one_version_of_each_action_is_used():
    used = {u for f in WORKFLOWS for u in re.findall(r"uses: (\S+@\S+)", f.read_text())}
    assert len({name.partition("@")[0] for name in used}) == len(used) >= 4


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_scripts_and_commands_of_the_workflows_exist(file):
    text = "\n".join(step.get("run", "") for step in steps_of(file))
    scripts = set(re.findall(r"\.ci/[\w.]+", text))
    assert scripts and all((ROOT / script).is_file() for script in scripts)
    for name, arguments in re.findall(r"bin/packs (\w+)(.*)", text):
        command = packs.get_command(click.Context(packs), name)
        flags = set(re.findall(r" (-{1,2}[\w-]+)", arguments))
        assert flags <= {flag for option in command.params for flag in option.opts}


def test_the_oldest_and_the_newest_python_of_the_metadata_are_tested():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    classified = re.findall(r"Python :: (3\.\d+)", text)
    matrix = yaml.safe_load((ROOT / ".github/workflows/linux.yml").read_text())["jobs"]["all"]
    tested = matrix["strategy"]["matrix"]["python-version"]
    assert tested == [classified[0], classified[-1]]
    assert f'requires-python = ">={tested[0]}"' in text
