"""Which module of the package imports which, read from the sources."""

import ast
import gc
import re
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "mlx_packs"
OPTIONAL = {"studio"}  # packages that may be deleted: no other needs them
# Where a string may name a module: tables of names that settings and users select.
TABLES = {"config/choices.py", "training/observers/__init__.py", "bases/readers.py"}
# Tables of what a device selects; a closure has all of it.
DEVICE_TABLES = {"late.py", "ops/dispatch.py"}


def written_files(package: Path = PACKAGE) -> list[Path]:
    """The Python files of a package that people write: all but those that protoc generates."""
    return [file for file in sorted(package.rglob("*.py")) if not file.name.endswith("_pb2.py")]


@cache
def nodes_of(file: Path) -> tuple[ast.AST, ...]:
    """The syntax tree of a file as its nodes, read once for all tests."""
    gc.disable()  # garbage collections, now and in later tests, would pass over all nodes
    nodes = tuple(ast.walk(ast.parse(file.read_bytes())))
    gc.freeze()
    gc.enable()
    return nodes


def dotted(node: ast.AST) -> str:
    """The name that a chain of attributes spells; empty for other expressions."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := dotted(node.value)):
        return f"{owner}.{node.attr}"
    return ""


def imported_names(file: Path, typing: bool = True, package: Path = PACKAGE) -> list[str]:
    """Dotted names of all that a file of a package imports, wherever the import stands.

    typing: whether imports under ``if TYPE_CHECKING`` count.
    """
    return [name for name, is_type in _imports(file, package) if typing or not is_type]


@cache
def _imports(file: Path, package: Path) -> list[tuple[str, bool]]:
    """Each imported name, and whether the import is for types only."""
    parents = [package.name, *file.relative_to(package).parts[:-1]]
    names = []
    of_types = set()

    for node in nodes_of(file):
        if isinstance(node, ast.If) and dotted(node.test).endswith("TYPE_CHECKING"):
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


_NAMED = (  # module:attribute, and the dotted name of a module
    re.compile(r"""["']((?:\w+\.)*\w+):(?:\w+(?:\.\w+)*["']|\{)"""),
    re.compile(r"""["']((?:\w+\.)+\w+)["']"""),
)


@cache
def modules_in_strings(file: Path, package: Path = PACKAGE) -> tuple[Path, ...]:
    """Files that strings of a file name as ``module:attribute`` or ``a.module``, one a string.

    The name of the module starts at the package, or at the folder of the file.
    """
    named = []
    text = file.read_text(encoding="utf-8")
    for name in [name for pattern in _NAMED for name in pattern.findall(text)]:
        parts = name.removeprefix(f"{package.name}.").split(".")
        folders = (file.parent, package) if len(parts) == 1 else (package, file.parent)
        candidates = [folder.joinpath(*parts).with_suffix(".py") for folder in folders]
        named += [path for path in candidates if path.is_file()][:1]
    return tuple(named)


def closure(module: str, strings: bool = False) -> set[Path]:
    """The files that a module needs, itself included, imports in functions too, types not.

    strings: whether a string that names a module counts as an import of it, outside of `TABLES`.
    """
    start = PACKAGE.joinpath(*module.split(".")).with_suffix(".py")
    needed, waiting = set(), [start]
    while waiting:
        file = waiting.pop()
        if file not in needed:
            needed.add(file)
            waiting += imported_modules(file, typing=False)
            if strings and file.relative_to(PACKAGE).as_posix() not in TABLES:
                waiting += modules_in_strings(file)
    return needed
