"""What SECURITY.md, docs/reliability.md and the dependencies promise is held by something."""

import ast
import re
from pathlib import Path

import pytest

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
