"""What SECURITY.md, docs/reliability.md and the dependencies promise is held by something."""

import ast
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
DOCUMENTS = ["SECURITY.md", "docs/reliability.md"]
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)")


def functions_of(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def rows_of(document: str) -> list[list[str]]:
    """The rows of a document's tables that promise something, without headings."""
    lines = (ROOT / document).read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]
    return [row for row in rows if row[-1] not in ("test", "---")]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_promise_names_a_test_that_exists(document):
    rows = rows_of(document)
    missing = [row for row in rows if not TEST.search(row[-1])]
    for row in rows:
        for file, name in TEST.findall(row[-1]):
            if not (ROOT / file).is_file() or name not in functions_of(ROOT / file):
                missing.append(row)
    assert rows and not missing


@pytest.mark.parametrize("document", DOCUMENTS)
def test_no_promise_is_made_twice(document):
    promises = [row[0] for row in rows_of(document)]
    assert len(promises) == len(set(promises))


def project() -> str:
    return (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def dependencies(text: str) -> list[Requirement]:
    block = re.search(r"\ndependencies = \[\n(.*?)\n\]", text, re.S).group(1)
    return [Requirement(line) for line in re.findall(r'^  "(.*)",', block, re.M)]


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = [Requirement(line) for line in lines if not line.startswith("#")]
    return {r.name: str(r.specifier).removeprefix("==") for r in pinned}


def private_names() -> dict[str, set[str]]:
    """Names with an underscore that are taken from mlx and mlx-lm, by package."""
    found: dict[str, set[str]] = {"mlx-lm": set(), "mlx": set()}
    of_objects = {"_tokenizer": "mlx-lm", "_chat_template": "mlx-lm", "_no_grad": "mlx"}
    for file in sorted((ROOT / "mlx_packs").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mlx"):
                package = {"mlx_lm": "mlx-lm", "mlx": "mlx"}.get(node.module.split(".")[0])
                names = {a.name for a in node.names if a.name.startswith("_") and not node.level}
                found.get(package, set()).update(names)
            elif isinstance(node, ast.Attribute) and node.attr in of_objects:
                if not (isinstance(node.value, ast.Name) and node.value.id == "self"):
                    found[of_objects[node.attr]].add(node.attr)
            elif isinstance(node, ast.Constant) and node.value in of_objects:
                found[of_objects[node.value]].add(node.value)
    return found


def test_private_names_are_known_and_their_packages_bounded():
    assert private_names() == {
        "mlx-lm": {"_byte_decoder", "_get_classes", "_tokenizer", "_chat_template"},
        "mlx": {"_no_grad"},
    }
    bounded = {r.name for r in dependencies(project()) if "<" in str(r.specifier).replace("<=", "")}
    assert {"mlx", "mlx-lm", "transformers", "huggingface_hub", "click", "numpy"} <= bounded


def test_constraints_are_within_the_bounds_and_pin_every_dependency():
    pinned = pins()
    for requirement in dependencies(project()):
        name = requirement.name.replace("_", "-").lower()
        assert requirement.specifier.contains(pinned[name]), requirement
    assert len(pinned) > 40 and all(re.fullmatch(r"[\d.]+", v) for v in pinned.values())


def test_the_weekly_job_lifts_every_upper_bound():
    code = (ROOT / ".ci" / "lift_bounds.py").read_text(encoding="utf-8")
    scope: dict = {"__file__": str(ROOT / ".ci" / "lift_bounds.py"), "__name__": "lift_bounds"}
    exec(compile(code, "lift_bounds.py", "exec"), scope)
    text = scope["lifted"](project())
    before, after = dependencies(project()), dependencies(text)
    assert [r.name for r in before] == [r.name for r in after]
    assert not any("<" in str(r.specifier) for r in after)
    assert {str(r.marker) for r in before} == {str(r.marker) for r in after}
    assert any(">=" in str(r.specifier) for r in after)
    assert "python .ci/lift_bounds.py" in (ROOT / ".github/workflows/newest.yml").read_text()


def test_licences_are_read_from_an_sbom_and_must_be_there():
    code = (ROOT / ".ci" / "licences.py").read_text(encoding="utf-8")
    scope: dict = {"__name__": "licences"}
    exec(compile(code, "licences.py", "exec"), scope)
    encoded = {"content": "aGVsbG8=", "encoding": "base64"}
    declared = [
        {"license": {"id": "MIT"}},
        {"license": {"name": "declared license file: L", "text": encoded}},
        {"license": {"name": "declared license file: M", "text": {"content": "plain (c)"}}},
    ]
    component = {"name": "b", "version": "1", "licenses": declared}
    other = {"name": "A", "version": "2", "licenses": [{"expression": "MIT OR Apache-2.0"}]}
    lines = scope["document"]({"components": [component, other]}).splitlines()
    assert lines[4:6] == ["| A | 2 | MIT OR Apache-2.0 |", "| b | 1 | MIT |"]
    assert "## b 1" in lines and "hello" in lines and "plain (c)" in lines
    with pytest.raises(ValueError, match="c 3"):
        scope["document"]({"components": [{"name": "c", "version": "3"}]})
    assert scope["LOCAL"].search('"url": "file:///x"') and scope["LOCAL"].search('"/home/me/x"')
    assert not scope["LOCAL"].search('"url": "https://github.com/home/tmp"')


def test_policy_files_name_no_machine_and_no_registry():
    files = ["SECURITY.md", "constraints.txt", "docs/reliability.md", ".ci/release", ".ci/run"]
    for name in files:
        text = (ROOT / name).read_text(encoding="utf-8")
        assert not re.search(r"--(extra-)?index-url|/home/|/Users/|simple/", text), name
