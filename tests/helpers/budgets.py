"""The limits of tests/budgets.toml, which only shrink.

python -m tests.helpers.budgets    # lower the limits to what is measured
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.helpers.imports import (
    DEVICE_TABLES,
    PACKAGE,
    TABLES,
    closure,
    modules_in_strings,
    nodes_of,
    written_files,
)

WIDE = 100  # columns
SMALL = 4  # lines of a function that may stand where it is called

Function = ast.FunctionDef | ast.AsyncFunctionDef
OWNERS = ast.Module | ast.ClassDef | Function


def figures(package: Path = PACKAGE) -> dict[str, float]:
    """Every figure by its name; each is better when lower, unless its name begins with 'least'."""
    files = written_files(package)
    trees = [nodes_of(file) for file in files]
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    docstrings = sum(map(docstring_lines, trees))
    code = (code_lines(lines) - docstrings) / 1000

    statements = [node for nodes in trees for node in nodes]
    definitions = sum(isinstance(node, OWNERS) for node in statements)
    choices = [node for node in statements if isinstance(node, ast.IfExp)]
    return {
        "conditional_expressions_per_1000_lines": round(len(choices) / code, 2),
        "nested_conditional_expressions": sum(map(has_inner_choice, choices)),
        "parallel_assignments_per_1000_lines": round(
            sum(map(assigns_in_parallel, statements)) / code, 2
        ),
        "products_with_a_condition": sum(map(multiplies_by_condition, statements)),
        "small_private_functions_called_once": called_once(trees),
        "docstring_lines_per_definition": round(docstrings / definitions, 1),
        "wide_lines": sum(len(line) > WIDE for line in lines),
    }


def functions(nodes: Iterable[ast.AST]) -> Iterator[Function]:
    """All functions of a module, methods and inner ones too."""
    return (node for node in nodes if isinstance(node, Function))


def code_lines(lines: Iterable[str]) -> int:
    """Lines that are neither blank nor a comment, those of docstrings among them."""
    return sum(line.strip() != "" and not line.strip().startswith("#") for line in lines)


def docstring_lines(nodes: Iterable[ast.AST]) -> int:
    """Lines of all docstrings of a module that are not blank."""
    texts = [ast.get_docstring(node) for node in nodes if isinstance(node, OWNERS)]
    return sum(line.strip() != "" for text in texts if text for line in text.splitlines())


def has_inner_choice(choice: ast.IfExp) -> bool:
    """Whether a conditional expression has another one inside."""
    return any(isinstance(node, ast.IfExp) for node in ast.walk(choice) if node is not choice)


def assigns_in_parallel(node: ast.AST) -> bool:
    """Whether it is `a, b = x, y`."""
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Tuple)
    )


def multiplies_by_condition(node: ast.AST) -> bool:
    """Whether a text or list is multiplied by a condition, as an `if` would choose it."""
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)):
        return False
    sides = (node.left, node.right)
    has_text = any(
        isinstance(side, ast.JoinedStr | ast.List)
        or (isinstance(side, ast.Constant) and isinstance(side.value, str))
        for side in sides
    )
    return has_text and any(map(is_condition, sides))


def is_condition(node: ast.AST) -> bool:
    """Whether an expression is true or false by its form."""
    if isinstance(node, ast.Call):
        return getattr(node.func, "id", None) == "bool"
    is_negation = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    return is_negation or isinstance(node, ast.Compare | ast.BoolOp)


def called_once(trees: Iterable[tuple[ast.AST, ...]]) -> int:
    """Private functions of at most `SMALL` lines whose name is used once in their module."""
    count = 0
    for nodes in trees:
        uses = Counter(getattr(node, "id", getattr(node, "attr", None)) for node in nodes)
        for function in functions(nodes):
            size = (function.end_lineno or 0) - function.body[0].lineno + 1
            is_private = function.name.startswith("_") and not function.name.startswith("__")
            count += is_private and size <= SMALL and uses[function.name] == 1
    return count


_CLASS = re.compile(r"(?m)^ *class (\w+)")


def lines_by_package(package: Path = PACKAGE) -> dict[str, int]:
    """Lines of every package, stubs included; modules beside the packages are "ground"."""
    lines: Counter[str] = Counter()
    for file in [*package.rglob("*.py"), *package.rglob("*.pyi")]:
        parts = file.relative_to(package).parts
        unit = parts[0] if len(parts) > 1 else "ground"
        lines[unit] += file.read_text(encoding="utf-8").count("\n")
    return dict(sorted(lines.items()))


def totals(package: Path = PACKAGE) -> dict[str, int]:
    """Counts over the package; each is better when lower. Generated files count in lines only."""
    files = written_files(package)
    texts = [file.read_text(encoding="utf-8") for file in files]
    classes = Counter(name for text in texts for name in _CLASS.findall(text))
    strings = {
        file.relative_to(package).as_posix(): len(modules_in_strings(file, package))
        for file in files
    }
    return {
        "lines": sum(lines_by_package(package).values()),
        "files": len(files),
        "classes": classes.total(),
        "class_names_used_twice": sum(count > 1 for count in classes.values()),
        "pack_errors": sum(text.count("PackError(") for text in texts),
        "strings_that_name_modules": sum(
            n for name, n in strings.items() if name not in TABLES | DEVICE_TABLES
        ),
    }


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # which pytest needs there

FILE = Path(__file__).parents[1] / "budgets.toml"


def limits() -> dict[str, dict[str, Any]]:
    """The limits by section."""
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def measured(limits: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """What is measured now, by section and name; times of tests are not among it."""
    with_strings = limits["closures_with_strings"]
    return {
        "closures": {name: len(closure(name)) for name in limits["closures"]},
        "closures_with_strings": {name: len(closure(name, strings=True)) for name in with_strings},
        "readability": figures(),
        "lines": lines_by_package(),
        "totals": totals(),
    }


def exceeded(name: str, value: float, limit: float) -> bool:
    """Whether a figure is on the wrong side of its limit."""
    return value < limit if name.startswith("least_") else value > limit


def lowered(section: dict[str, float], measured: dict[str, float]) -> dict[str, float]:
    """The limits of a section, the better of each and what is measured.

    A share of the lines stays: it rises where others are deleted.
    """
    return {
        name: limit
        if exceeded(name, measured[name], limit) or name.endswith("_per_1000_lines")
        else measured[name]
        for name, limit in section.items()
    }


def main() -> int:
    """Write the lower limits, and leave comments and order as they are."""
    sections = re.split(r"(?m)^(?=\[)", FILE.read_text(encoding="utf-8"))
    now = limits()
    for section, values in measured(now).items():
        place = next(i for i, text in enumerate(sections) if text.startswith(f"[{section}]"))
        for name, value in lowered(now[section], values).items():
            line = rf'(?m)^("?{re.escape(name)}"? = )[\d.]+'
            sections[place] = re.sub(line, rf"\g<1>{value:.10g}", sections[place])
    FILE.write_text("".join(sections), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
