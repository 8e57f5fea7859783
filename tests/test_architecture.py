"""The order of packages: each imports only from those above it, deferred imports included."""

import ast
import re
from collections.abc import Callable
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from mlx_packs.config.functions import FUNCTION
from mlx_packs.late import load
from mlx_packs.training.observers import OBSERVERS
from tests.helpers.imports import (
    OPTIONAL,
    PACKAGE,
    dotted,
    imported_modules,
    imported_names,
    nodes_of,
)

# A package (or module at the top) imports only from those above it, and from itself.
LAYERS = """
terminal errors sandbox plugins signals late cores runtime kinds reading filesystem files cache tensors
display gates measurements chips macos
distributed config report ops cpu optim nn bases offload vision adapters data objectives inference memory packs evaluation
tasks training sweeps learning
convert serving studio bench layers extras cli
""".split()
ENTRY_POINTS = ("__init__", "__main__", "train")  # import what they like; nobody imports them

# Public functions that are methods of `Pack`, too: it imports them from the package itself.
METHODS = {"packs": {"merge_pack", "export_pack", "push"}}


def unit_of(file: Path) -> str:
    """The package below mlx_packs that a file belongs to, or the module that it is."""
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def imports_between_units() -> dict[tuple[str, str], set[str]]:
    """(importing unit, imported unit) -> the files that import, without entry points."""
    edges: dict[tuple[str, str], set[str]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        unit = unit_of(file)
        for name in imported_names(file):
            package, _, rest = name.partition(".")
            imported = rest.split(".")[0]
            is_face = imported == "__version__" or rest in METHODS.get(unit, ())
            if package != "mlx_packs" or imported == unit or is_face or unit in ENTRY_POINTS:
                continue
            edges.setdefault((unit, imported), set()).add(str(file.relative_to(PACKAGE)))
    return edges


def test_packages_have_a_place_and_import_only_from_above():
    units = {unit_of(file) for file in PACKAGE.rglob("*.py")} - set(ENTRY_POINTS)
    assert set(LAYERS) - OPTIONAL <= units <= set(LAYERS)
    upward = {
        (unit, imported): files
        for (unit, imported), files in imports_between_units().items()
        if imported not in LAYERS[: LAYERS.index(unit)]
    }
    assert not upward


@cache
def nodes() -> dict[str, tuple[ast.AST, ...]]:
    """The syntax tree of every module, as its nodes."""
    return {f.relative_to(PACKAGE).as_posix(): nodes_of(f) for f in sorted(PACKAGE.rglob("*.py"))}


def files_with(holds: Callable[[ast.AST], bool]) -> set[str]:
    """The modules of which a node has some property."""
    return {file for file, found in nodes().items() if any(map(holds, found))}


@pytest.mark.parametrize("package", [PACKAGE, PACKAGE.parent / "benchmarks"], ids=lambda p: p.name)
def test_no_module_imports_itself_by_way_of_others(package):
    graph = {file: imported_modules(file, package=package) for file in package.rglob("*.py")}
    faces = {package / "__init__.py", package / "__main__.py"}
    order = TopologicalSorter({file: graph[file] - faces for file in graph if file not in faces})
    try:
        order.prepare()
    except CycleError as error:
        cycle = " -> ".join(str(file.relative_to(package)) for file in error.args[1])
        raise AssertionError(cycle) from None


SATELLITES = set("sweeps learning convert serving bench layers extras cli".split())


def test_extras_are_only_loaded_by_name_and_import_only_the_core():
    edges = imports_between_units()
    assert not {edge for edge in edges if edge[1] in ("cpu", "extras")}
    assert not {imported for unit, imported in edges if unit == "extras"} & SATELLITES


# Facades that users call by keyword; ruff holds all others to 8 parameters.
FACADES = {"train_pack", "train_seeds", "merge_pack", "combine_packs"}
FACADES |= {"describe_data", "evaluate", "evaluate_batch", "evaluate_tasks"}


def test_functions_and_modules_are_short_and_take_few_parameters():
    long_modules = set()
    long_functions = []
    facades = set()

    for file, found in nodes().items():
        if (PACKAGE / file).read_text(encoding="utf-8").count("\n") > 600:
            long_modules.add(file)
        for node in found:
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            lines = (node.end_lineno or 0) - node.lineno + 1
            if lines > 80:
                long_functions.append(f"{file}:{node.lineno} {node.name}: {lines} lines")

            arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            if len([a for a in arguments if a.arg not in ("self", "cls")]) > 8:
                facades.add(node.name)

    assert not long_modules and not long_functions
    assert facades == FACADES


# Who reads a file otherwise than by `reading`, by the reason.
OWN_READERS = {
    f"{name}.py"
    for names in (
        # weights of files that were checked: mapped, or read by mx.load
        "bases/encoder bases/fingerprint bases/gguf/header bases/loading",
        "bases/writer convert/merge_plan layers/registered offload/blocks offload/placing tensors",
        "training/attached",
        # what the program itself writes, makes, locks or downloads, to verify it or to add to it
        "cache convert/gguf data/encoding data/token_cache data/token_store files filesystem",
        "learning/rows packs/hub serving/feedback sweeps/sweep sweeps/trial vision/store",
        # a run of its own
        "training/checkpoint training/ranks training/run_folder",
        # parts of the program: kernels, the stub, a page; libraries of this process
        "__init__ cpu/blas errors ops/_backend serving/page",
        # what Linux says, and results of processes that it starts
        "cores memory/pressure runtime sandbox/child sandbox/process",
        # arrays and messages of other ranks, bounded
        "distributed/group distributed/link extras/pipeline/stage",
        # bytes of a file that was read, in a sandbox
        "sandbox/images",
        # rows and their cells, bounded
        "data/json_lines data/messages data/row_format data/rows",
    )
    for name in names.split()
}
READS = {"open", "read_text", "read_bytes", "safe_open"}
PARSERS = {"json.loads", "json.load", "yaml.load", "yaml.safe_load"}
PARSERS |= {"mx.load", "np.load", "np.memmap"}
WRITES = {"w", "wb", "a", "ab"}


def is_read(node: ast.AST) -> bool:
    """Whether a call opens or parses a file; what was just written as text does not count."""
    if not isinstance(node, ast.Call):
        return False
    function = dotted(node.func)
    if function in PARSERS:
        return not any(ast.unparse(a).startswith(("json.dumps", "to_json")) for a in node.args)

    name = getattr(node.func, "attr", None)
    if name not in READS and function not in READS - {"read_text"}:  # that of `reading` is bounded
        return False
    modes = {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
    return function != f"Pack.{name}" and not modes & WRITES


def test_files_of_others_are_read_by_one_module():
    assert files_with(is_read) - {"reading.py"} <= OWN_READERS


# What writes to a terminal, all of it through `terminal.echo` or of text that is `printable`.
OUTPUT = {"terminal.py", "display.py", "cli/output.py"}


def writes_to_a_terminal(node: ast.AST) -> bool:
    """Whether a node prints, imports rich, or takes stdout or stderr in its hands."""
    if isinstance(node, ast.Call):
        echoes = ("print", "click.echo", "click.secho", "click.echo_via_pager")
        return dotted(node.func) in echoes

    if isinstance(node, ast.ImportFrom):
        names = {alias.name for alias in node.names}
        is_stream = node.module == "sys" and bool(names & {"stdout", "stderr"})
        is_echo = node.module == "click" and bool(names & {"echo", "secho"})
        return is_stream or is_echo or (node.module or "").split(".")[0] == "rich"

    if isinstance(node, ast.Import):
        return any(alias.name.split(".")[0] == "rich" for alias in node.names)

    return isinstance(node, ast.Attribute) and dotted(node) in ("sys.stdout", "sys.stderr")


def test_only_three_modules_write_to_a_terminal():
    # the harness prints, and stdout is for results
    assert files_with(writes_to_a_terminal) - {"evaluation/lm_eval.py"} == OUTPUT


PRIVATE = {"_tokenizer": "mlx-lm", "_chat_template": "mlx-lm", "_no_grad": "mlx"}


def private_names(node: ast.AST) -> list[tuple[str, str]]:
    """Names with an underscore that a node takes from mlx and mlx-lm, each with its package."""
    if isinstance(node, ast.ImportFrom) and not node.level:
        package = {"mlx_lm": "mlx-lm", "mlx": "mlx"}.get((node.module or "").split(".")[0])
        return [(package, a.name) for a in node.names if package and a.name.startswith("_")]

    name = None
    if isinstance(node, ast.Attribute) and dotted(node.value) != "self":
        name = node.attr
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        name = node.value
    return [(PRIVATE[name], name)] if name in PRIVATE else []


def test_private_names_of_mlx_are_known():
    """Their packages have upper bounds in pyproject.toml (test_policy.py)."""
    assert {
        name for found in nodes().values() for node in found for name in private_names(node)
    } == {
        *(("mlx-lm", name) for name in ("_byte_decoder", "_get_classes")),
        *((package, name) for name, package in PRIVATE.items()),
    }


LATE_NAME = re.compile(r"(?:\w+\.)+\w+:\w+(?:\.\w+)*")


def test_every_name_that_is_loaded_late_exists():
    names = {f"training.observers.{name}" for name in OBSERVERS.values() if isinstance(name, str)}
    for node in (node for found in nodes().values() for node in found):
        text = getattr(node, "value", None)
        if isinstance(text, str) and LATE_NAME.fullmatch(text):
            names.add(text.removeprefix("mlx_packs."))

    names.remove(FUNCTION)  # a form of settings, no name
    assert "cpu.blas:bind" in names and len(names) > 40
    for name in names:
        assert load(name) is not None, name
