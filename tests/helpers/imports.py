"""Which module of the package imports which, read from the sources."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "mlx_packs"


def imported_names(file: Path, typing: bool = True, package: Path = PACKAGE) -> Iterator[str]:
    """Dotted names of all that a file of a package imports, wherever the import stands.

    typing: whether imports under ``if TYPE_CHECKING`` count.
    """
    parents = [package.name, *file.relative_to(package).parts[:-1]]
    tree = ast.parse(file.read_text(encoding="utf-8"))
    ignored = set() if typing else set(_of_types(tree))
    for node in ast.walk(tree):
        if node in ignored:
            continue
        if isinstance(node, ast.ImportFrom):
            prefix = parents[: len(parents) - node.level + 1] if node.level else []
            module = ".".join([*prefix, *((node.module or "").split("."))]).strip(".")
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def _of_types(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            yield from ast.walk(node)


@cache
def imported_modules(file: Path, typing: bool = True, package: Path = PACKAGE) -> frozenset[Path]:
    """Files of its package that a file imports; names of a module count for the module."""
    files = set()
    for name in imported_names(file, typing, package):
        parts = name.split(".")
        while parts and parts[0] == package.name:
            path = package.joinpath(*parts[1:])
            candidates = (path.with_suffix(".py"), path / "__init__.py")
            if module := next((file for file in candidates if file.is_file()), None):
                files.add(module)
                break
            parts.pop()
    return frozenset(files - {file})


def closure(module: str) -> set[Path]:
    """The files that a module needs, itself included, imports in functions too, types not."""
    start = PACKAGE.joinpath(*module.split(".")).with_suffix(".py")
    needed, waiting = set(), [start]
    while waiting:
        file = waiting.pop()
        if file not in needed:
            needed.add(file)
            waiting += imported_modules(file, typing=False)
    return needed
