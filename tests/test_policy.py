"""What SECURITY.md, docs/reliability.md and the dependencies promise is held by something."""

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)")


def test_every_promise_is_made_once_and_names_a_test_that_exists():
    """The rows of the tables in SECURITY.md and docs/reliability.md, without headings."""
    promises, missing = [], []
    for document in ("SECURITY.md", "docs/reliability.md"):
        for line in (ROOT / document).read_text(encoding="utf-8").splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if "|" not in line or cells[-1] in ("test", "---"):
                continue
            promises.append(cells[0])
            named = TEST.findall(cells[-1])
            if not named or not all(has_test(ROOT / file, name) for file, name in named):
                missing.append(line)
    assert not missing
    assert len(promises) == len(set(promises)) > 50


def has_test(file: Path, name: str) -> bool:
    return file.is_file() and f"def {name}(" in file.read_text(encoding="utf-8")


def project() -> str:
    return (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def dependencies(text: str) -> list[Requirement]:
    block = re.search(r"\ndependencies = \[\n(.*?)\n\]", text, re.S).group(1)
    return [Requirement(line) for line in re.findall(r'^  "(.*)",', block, re.M)]


def test_constraints_pin_every_dependency_within_its_bounds():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    pinned = {pin.name: str(pin.specifier).removeprefix("==") for pin in pins}
    bounded = set()
    for requirement in dependencies(project()):
        name = requirement.name.replace("_", "-").lower()
        assert requirement.specifier.contains(pinned[name]), requirement
        if "<" in str(requirement.specifier).replace("<=", ""):
            bounded.add(requirement.name)
    # private names of the first two are used (test_architecture.py), and the others change fast
    assert {"mlx", "mlx-lm", "transformers", "huggingface_hub", "click", "numpy"} <= bounded


def test_licences_are_read_from_an_sbom_and_must_be_there():
    code = (ROOT / ".ci" / "licences.py").read_text(encoding="utf-8")
    scope: dict = {"__name__": "licences"}
    exec(compile(code, "licences.py", "exec"), scope)

    encoded = {"content": "aGVsbG8=", "encoding": "base64"}
    text = {"license": {"name": "declared license file: L", "text": encoded}}
    declared = [{"license": {"id": "MIT"}}, text]
    component = {"name": "b", "version": "1", "licenses": declared}
    other = {"name": "A", "version": "2", "licenses": [{"expression": "MIT OR Apache-2.0"}]}

    lines = scope["document"]({"components": [component, other]}).splitlines()
    assert lines[4:6] == ["| A | 2 | MIT OR Apache-2.0 |", "| b | 1 | MIT |"]
    assert "## b 1" in lines and "hello" in lines
    with pytest.raises(ValueError, match="c 3"):
        scope["document"]({"components": [{"name": "c", "version": "3"}]})

    assert scope["LOCAL"].search('"url": "file:///x"') and scope["LOCAL"].search('"/home/me/x"')
    assert not scope["LOCAL"].search('"url": "https://github.com/home/tmp"')


def test_policy_files_name_no_machine_and_no_registry():
    names = "SECURITY.md constraints.txt docs/reliability.md docs/releasing.md CITATION.cff"
    files = [ROOT / name for name in names.split()]
    files += [ROOT / ".ci" / name for name in ("release", "run", "dry_run")]
    files += (ROOT / ".github").rglob("*.*")
    for name in files:
        text = name.read_text(encoding="utf-8")
        assert not re.search(r"--(extra-)?index-url|/home/|/Users/|simple/", text), name
