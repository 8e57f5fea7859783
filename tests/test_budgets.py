"""What a module needs, how the sources read and how large they are: tests/budgets.toml."""

import pytest

from tests.helpers.budgets import exceeded, figures, limits, lines_by_package, measured, totals
from tests.helpers.imports import (
    DEVICE_TABLES,
    OPTIONAL,
    PACKAGE,
    TABLES,
    closure,
    modules_in_strings,
)
from tests.helpers.seconds import slow_folders


@pytest.fixture(scope="module")
def now():
    """What is measured, by section."""
    return measured(limits())


@pytest.mark.parametrize("section", sorted(set(limits()) - {"seconds"}))
def test_nothing_is_worse_than_its_limit(section, now):
    allowed = limits()[section]
    assert set(allowed) - OPTIONAL <= set(now[section]) <= set(allowed)
    assert not {
        name: f"{value}, at most {allowed[name]}"
        for name, value in now[section].items()
        if exceeded(name, value, allowed[name])
    }


def test_a_closure_sees_imports_and_strings():
    assert PACKAGE / "ops" / "grouped_lora.py" in closure("nn.lora")
    kernel = PACKAGE / "ops" / "nf4_kernel.py"
    assert kernel in closure("nn.lora", strings=True) - closure("nn.lora")
    assert all(modules_in_strings(PACKAGE / table) for table in TABLES | DEVICE_TABLES)


def test_sizes_see_what_they_count(tmp_path):
    package = tmp_path / "mlx_packs"
    (package / "data").mkdir(parents=True)
    (package / "late.py").write_text("class A: ...\n\n\nclass B:\n    class A: ...\n")
    (package / "data" / "__init__.py").write_text("")
    (package / "data" / "rows.py").write_text(
        "load('late:A')\nload('mlx_packs.late:A')\nload(f'rows:{A}')\nload('no.module:A')\n"
        "raise PackError('a: b')\n"
    )

    assert lines_by_package(package) == {"data": 5, "ground": 5}
    assert totals(package) == {
        "lines": 10,
        "files": 3,
        "classes": 3,
        "class_names_used_twice": 1,
        "pack_errors": 1,
        "strings_that_name_modules": 3,
    }


def test_a_folder_of_tests_may_take_twice_its_limit():
    allowed = {"cli": 20, "data": 4, "nn": 30, "ops": 40, "packs": 50}
    assert not slow_folders(allowed | {"cli": 39.9, "data": 18.9}, allowed)
    slow = slow_folders(allowed | {"cli": 40.1, "data": 19.1, "new": 1}, allowed)
    assert set(slow) == {"cli", "data", "new"}
    assert not slow_folders({name: 2 * seconds for name, seconds in allowed.items()}, allowed)


def test_figures_see_what_they_count(tmp_path):
    (tmp_path / "dense.py").write_text(
        '"""One.\n\nTwo."""\n\n\ndef f(x):\n    """Three."""\n'
        + "    a, b = x, 2\n" * 14
        + "    c = 1 if x else 2 if b else 3\n"
        + "    return _g(x) + 'text' * (a > 1)\n\n\ndef _g(x):\n    return x\n"
        + f"\n\n# {'-' * 99}\n"
    )

    assert figures(tmp_path) == {
        "conditional_expressions_per_1000_lines": round(2 / 0.019, 2),
        "nested_conditional_expressions": 1,
        "parallel_assignments_per_1000_lines": round(14 / 0.019, 2),
        "products_with_a_condition": 1,
        "small_private_functions_called_once": 1,
        "docstring_lines_per_definition": 1.0,
        "wide_lines": 1,
    }
