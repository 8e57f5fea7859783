"""The files in .github/workflows: valid by GitHub's schema, pinned, and of scripts that exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
# The branch that the action's own documentation names.
MOVING = {"pypa/gh-action-pypi-publish@release/v1"}


@pytest.mark.interop
def test_workflows_are_valid_by_the_schema_of_github():
    schema = ["check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    command = [sys.executable, "-m", *schema, *WORKFLOWS]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert len(WORKFLOWS) == 6 and result.returncode == 0, result.stdout + result.stderr


def test_actions_are_pinned_permissions_are_few_and_scripts_exist():
    actions = set()
    for file in WORKFLOWS:
        text = file.read_text(encoding="utf-8")
        workflow = yaml.safe_load(text)
        assert workflow["permissions"] == {"contents": "read"}, file.name
        for script in re.findall(r"\.ci/[\w.]+", text):
            assert (ROOT / script).is_file(), (file.name, script)
        for step in (s for job in workflow["jobs"].values() for s in job.get("steps", ())):
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False, file.name
        actions |= {name for name in re.findall(r"uses: (\S+)", text) if name[0] != "."}

    assert not {name for name in actions - MOVING if not re.search(r"@[0-9a-f]{40}$", name)}
    assert len({name.partition("@")[0] for name in actions}) == len(actions) >= 4


def test_the_parts_of_ci_run_at_once():
    parts = re.search('^PARTS="(.+)"$', (ROOT / ".ci/run").read_text(), re.MULTILINE)[1].split()
    job = yaml.safe_load((ROOT / ".github/workflows/linux.yml").read_text())["jobs"]["all"]
    assert job["strategy"]["matrix"]["part"] == parts and len(parts) == 3
    unknown = subprocess.run([ROOT / ".ci/run", "fast"], capture_output=True, text=True)
    assert unknown.returncode == 2 and f"There are: {' '.join(parts)}" in unknown.stderr


def test_the_oldest_and_the_newest_python_of_the_metadata_are_tested():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    classified = re.findall(r"Python :: (3\.\d+)", text)
    matrix = yaml.safe_load((ROOT / ".github/workflows/linux.yml").read_text())["jobs"]["all"]
    tested = matrix["strategy"]["matrix"]["python-version"]
    assert tested == [classified[0], classified[-1]]
    assert f'requires-python = ">={tested[0]}"' in text
