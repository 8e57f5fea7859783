"""Which module of the package imports which, read from the sources."""

import ast
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "mlx_packs"


def imported_names(file: Path, typing: bool = True, package: Path = PACKAGE) -> list[str]:
    """Dotted names of all that a file of a package imports, wherever the import stands.

    typing: whether imports under ``if TYPE_CHECKING`` count.
    """
    return [name for name, is_type in _imports(file, package) if typing or not is_type]


@cache
def _imports(file: Path, package: Path) -> list[tuple[str, bool]]:
    """Each imported name, and whether the import is for types only."""
    parents = [package.name, *file.relative_to(package).parts[:-1]]
    tree = ast.parse(file.read_text(encoding="utf-8"))
    names = []
    of_types = set()

    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            of_types.update(ast.walk(node))
        elif isinstance(node, ast.ImportFrom):
            prefix = parents[: len(parents) - node.level + 1] if node.level else []
            module = ".".join([*prefix, *((node.module or "").split("."))]).strip(".")
            names += [(f"{module}.{alias.name}", node in of_types) for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [(alias.name, node in of_types) for alias in node.names]

    return names


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
