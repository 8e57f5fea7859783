"""Every name that is loaded late exists."""

import re

from mlx_packs.late import load
from mlx_packs.training.observers.registry import OBSERVERS
from tests.helpers.imports import PACKAGE

_NAME = re.compile(r'"((?:\w+\.)+\w+:\w+(?:\.\w+)*)"')
_CALL = re.compile(r'load\(\s*f?"([^"]+)"')


def late_names() -> dict[str, str]:
    """The names in modules that load some late, and where each is."""
    names = {f"training.observers.{name}": "observers" for name in OBSERVERS.values()}
    for file in PACKAGE.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        if "late import load" in text:
            names |= dict.fromkeys(_NAME.findall(text), str(file))
    return names


def test_every_late_name_can_be_loaded():
    names = late_names()
    assert len(names) > 8
    for name in names:
        assert load(name) is not None, name


def test_every_call_names_what_it_loads_in_full_or_from_a_table():
    for file in PACKAGE.rglob("*.py"):
        for name in _CALL.findall(file.read_text(encoding="utf-8")):
            assert ":" in name or "{" in name, (file, name)
