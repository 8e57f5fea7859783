"""What a module needs, and how the sources read, is never worse than tests/budgets.toml."""

from tests.helpers.budgets import exceeded, limits
from tests.helpers.imports import PACKAGE, closure
from tests.helpers.readability import figures


def test_modules_need_no_more_modules_than_they_may():
    assert PACKAGE / "ops" / "grouped_lora.py" in closure("nn.lora")
    needed = {module: len(closure(module)) for module in limits()["closures"]}
    assert not {
        module: f"{count}, at most {limits()['closures'][module]}"
        for module, count in needed.items()
        if count > limits()["closures"][module]
    }


def test_the_sources_read_no_worse():
    measured, allowed = figures(), limits()["readability"]
    assert set(allowed) == set(measured)
    assert not {
        name: (measured[name], limit)
        for name, limit in allowed.items()
        if exceeded(name, measured[name], limit)
    }


def test_figures_see_what_they_count(tmp_path):
    (tmp_path / "dense.py").write_text(
        '"""One.\n\nTwo."""\n\n\ndef f(x):\n    """Three."""\n'
        + "    a, b = x, 2\n" * 14
        + "    c = 1 if x else 2 if b else 3\n"
        + "    return _g(x) + 'text' * (a > 1)\n\n\ndef _g(x):\n    return x\n"
        + f"\n\n# {'-' * 99}\n"
    )

    assert figures(tmp_path) == {
        "long_bodies_without_blank_line": 1,
        "conditional_expressions_per_1000_lines": round(2 / 0.019, 2),
        "nested_conditional_expressions": 1,
        "parallel_assignments_per_1000_lines": round(14 / 0.019, 2),
        "products_with_a_condition": 1,
        "small_private_functions_called_once": 1,
        "docstring_lines_per_1000_lines": round(3 / 0.019, 2),
        "wide_lines": 1,
    }
