"""Every name that is loaded late exists."""

import ast
import re

from mlx_packs.late import load
from mlx_packs.training.observers.registry import OBSERVERS
from tests.helpers.imports import PACKAGE

_NAME = re.compile(r"(?:\w+\.)+\w+:\w+(?:\.\w+)*")


def late_names() -> set[str]:
    """The names in modules that load some late."""
    names = {f"training.observers.{name}" for name in OBSERVERS.values() if isinstance(name, str)}
    for file in PACKAGE.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        if re.search(r"late import load|import (\w+, )*late\b", text):
            strings = (n.value for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Constant))
            names |= {s for s in strings if isinstance(s, str) and _NAME.fullmatch(s)}
    return names


def test_every_late_name_can_be_loaded():
    names = late_names()
    assert "cpu.blas:bind" in names and len(names) > 8
    for name in names:
        assert load(name) is not None, name
