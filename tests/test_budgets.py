"""What a module needs, and how the sources read, is never worse than tests/budgets.toml."""

import ast
from pathlib import Path

import pytest

from tests.helpers import readability
from tests.helpers.budgets import exceeded, limits, lowered
from tests.helpers.imports import PACKAGE, closure
from tests.helpers.readability import figures

LIMITS = limits()


@pytest.mark.parametrize("module", LIMITS["closures"])
def test_a_module_needs_no_more_modules_than_it_may(module):
    needed = sorted(str(file.relative_to(PACKAGE)) for file in closure(module))
    assert len(needed) <= LIMITS["closures"][module], needed


@pytest.fixture(scope="module")
def measured() -> dict[str, float]:
    return figures()


@pytest.mark.parametrize("name", LIMITS["readability"])
def test_the_sources_read_no_worse(name, measured):
    limit = LIMITS["readability"][name]
    assert not exceeded(name, measured[name], limit), (measured[name], limit)


def test_every_figure_has_a_limit(measured):
    assert set(LIMITS["readability"]) == set(measured)


def test_figures_see_what_they_count(tmp_path):
    (tmp_path / "dense.py").write_text(
        '"""One.\n\nTwo."""\n\n\ndef f(x):\n    """Three."""\n'
        + "    a, b = x, 2\n" * 14
        + "    c = 1 if x else 2 if b else 3\n"
        + "    return _g(x) + 'text' * (a > 1)\n\n\ndef _g(x):\n    return x\n"
        + f"\n\n# {'-' * 99}\n"
    )
    assert figures(tmp_path) == {
        "least_blank_lines_percent": 0.0,
        "long_bodies_without_blank_line": 1,
        "conditional_expressions_per_1000_lines": round(2 / 0.019, 2),
        "nested_conditional_expressions": 1,
        "parallel_assignments_per_1000_lines": round(14 / 0.019, 2),
        "products_with_a_condition": 1,
        "small_private_functions_called_once": 1,
        "docstring_lines_per_1000_lines": round(3 / 0.019, 2),
        "wide_lines": 1,
    }


def test_a_body_with_air_is_counted():
    source = "def f():\n    a = 1\n\n    return a\n"
    (function,) = readability.functions(ast.walk(ast.parse(source)))
    assert readability.body_lines(function, source.splitlines()) == ["a = 1", "", "return a"]


def test_limits_only_shrink():
    section = {"wide_lines": 10, "least_blank_lines_percent": 2.0}
    assert lowered(section, {"wide_lines": 12, "least_blank_lines_percent": 1.0}) == section
    better = {"wide_lines": 8, "least_blank_lines_percent": 3.0}
    assert lowered(section, better) == better


def test_a_closure_leaves_types_out_and_takes_deferred_imports():
    assert PACKAGE / "ops" / "grouped_lora.py" in closure("nn.lora")
    assert Path(PACKAGE / "schedules.py") not in closure("nn.lora")
