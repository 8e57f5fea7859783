"""The order of packages: each imports only from those above it, deferred imports included."""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.helpers.imports import PACKAGE, imported_modules, imported_names

# A package (or module at the top) imports only from those above it, and from itself.
LAYERS = """
terminal errors plugins signals fork late runtime kinds reading hashes filesystem leftovers files tensors run_clock
display gates measurements chips macos
distributed schedules config report ops cpu optim nn bases adapters data objectives inference packs memory evaluation
tasks training sweeps
convert serving bench layers extras cli
""".split()
ENTRY_POINTS = ("__init__", "__main__", "train")  # import what they like; nobody imports them

# Imports that still point upward. The list only shrinks.
UPWARD: set[tuple[str, str]] = set()


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
            if package != "mlx_packs" or imported in (unit, "__version__") or unit in ENTRY_POINTS:
                continue
            edges.setdefault((unit, imported), set()).add(str(file.relative_to(PACKAGE)))
    return edges


def test_every_package_has_its_place_in_the_order():
    units = {unit_of(file) for file in PACKAGE.rglob("*.py")} - set(ENTRY_POINTS)
    assert units == set(LAYERS)


def test_packages_import_only_from_above():
    upward = {
        (unit, imported): files
        for (unit, imported), files in imports_between_units().items()
        if imported not in LAYERS[: LAYERS.index(unit)]
    }
    assert set(upward) == UPWARD, upward


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


@pytest.mark.parametrize("package", ["cpu", "extras"])
def test_packages_that_are_only_loaded_by_name(package):
    users = {unit for unit, imported in imports_between_units() if imported == package}
    assert not users


SATELLITES = set("sweeps convert serving bench layers extras cli".split())


def test_extras_import_only_the_core():
    imported = {imported for unit, imported in imports_between_units() if unit == "extras"}
    assert not imported & SATELLITES


# Longer than the limit, each for its reason. A file is one idea, however long that is.
LONG_MODULES: dict[str, str] = {}
# Facades that users call by keyword; ruff holds all others to 8 parameters.
FACADES = {
    "train_pack",
    "merge_pack",
    "combine_packs",
    "evaluate",
    "evaluate_batch",
    "evaluate_tasks",
}


def test_modules_have_at_most_600_lines_and_functions_80():
    long_modules, long_functions = set(), []
    for file in sorted(PACKAGE.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        name = file.relative_to(PACKAGE).as_posix()
        if text.count("\n") > 600:
            long_modules.add(name)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > 80:
                    long_functions.append(f"{name}:{node.lineno} {node.name}: {lines} lines")
    assert long_modules == set(LONG_MODULES)
    assert not long_functions


def test_only_facades_take_more_than_eight_parameters():
    facades = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
                if len([a for a in arguments if a.arg not in ("self", "cls")]) > 8:
                    facades.add(node.name)
    assert facades == FACADES


# Who reads a file otherwise than by `reading`, and why.
OWN_READERS = {
    "packs/hub.py": "what it downloads, to append to it",
    "ops/_backend.py": "the program's own kernels",
    "runtime.py": "/proc and /sys",
    "tensors.py": "mx.load, of a file whose header was checked",
    "cpu/elf.py": "libraries of this process",
    "__init__.py": "the program's own stub",
    "convert/gguf.py": "mx.load, of the file that it wrote",
    "convert/merge_plan.py": "mx.load, of files that were checked",
    "bases/writer.py": "mx.load, of files that were checked",
    "bases/gguf/header.py": "mapped, of files that were checked",
    "bases/encoder.py": "mx.load, of files that were checked",
    "bases/fingerprint.py": "weights, of files that were checked",
    "bases/mapped_embedding.py": "mapped, of files that were checked",
    **dict.fromkeys(("data/token_cache.py", "data/encoding.py"), "a cache that it writes"),
    "objectives/state_store.py": "a file that it makes",
    **dict.fromkeys(("files.py", "filesystem.py", "leftovers.py"), "what it writes, and locks"),
    "data/token_store.py": "a file that it makes",
    "distributed/link.py": "messages of other ranks, bounded",
    **dict.fromkeys(("distributed/group.py", "extras/pipeline/stage.py"), "arrays of other ranks"),
    "training/ranks.py": "a run of its own, and names of its files",
    "memory/pressure.py": "what Linux says of memory",
    "serving/app.py": "a page of its own",
    "training/on_nan.py": "a run, by the reader",
    "sweeps/trial.py": "the log of a trial of its own",
    "sweeps/sweep.py": "a study of its own, to cut off an unfinished line",
    **dict.fromkeys(("data/rows.py", "data/tool_calls.py", "data/json_lines.py"), "rows, bounded"),
    **dict.fromkeys(("training/checkpoint.py", "training/run_folder.py"), "a run of its own"),
    **dict.fromkeys(("layers/registered.py", "training/run.py"), "files that were checked"),
}
READS = {"open", "read_text", "read_bytes", "safe_open"}
PARSERS = {
    "json.loads",
    "json.load",
    "yaml.load",
    "yaml.safe_load",
    "mx.load",
    "np.load",
    "np.memmap",
}
WRITES = {"w", "wb", "a", "ab"}


def reads_of(file: Path) -> Iterator[int]:
    """Lines of a module that open or parse a file; what was just written as text does not count."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        function = ast.unparse(node.func)
        owner, _, name = function.rpartition(".")
        modes = {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
        written = [ast.unparse(arg).startswith(("json.dumps", "to_json")) for arg in node.args]
        is_bounded = function == "read_text"  # that of `reading`, not of a path
        reads = name in READS and owner != "Pack" and not modes & WRITES and not is_bounded
        if reads or (function in PARSERS and not any(written)):
            yield node.lineno


def test_files_of_others_are_read_by_one_module():
    lines = {
        file.relative_to(PACKAGE).as_posix(): lines
        for file in sorted(PACKAGE.rglob("*.py"))
        if (lines := list(reads_of(file)))
    }
    lines.pop("reading.py")
    assert set(lines) <= set(OWN_READERS), lines


# What writes to a terminal, all of it through `terminal.echo` or of text that is `printable`.
OUTPUT = {"terminal.py", "display.py", "cli/output.py"}


def writes_to_a_terminal(node: ast.AST) -> bool:
    """Whether a node prints, imports rich, or takes stdout or stderr in its hands."""
    if isinstance(node, ast.Call):
        return ast.unparse(node.func) in (
            "print",
            "click.echo",
            "click.secho",
            "click.echo_via_pager",
        )
    if isinstance(node, ast.ImportFrom):
        names = {alias.name for alias in node.names}
        is_stream = node.module == "sys" and bool(names & {"stdout", "stderr"})
        is_echo = node.module == "click" and bool(names & {"echo", "secho"})
        return is_stream or is_echo or (node.module or "").split(".")[0] == "rich"
    if isinstance(node, ast.Import):
        return any(alias.name.split(".")[0] == "rich" for alias in node.names)
    return isinstance(node, ast.Attribute) and ast.unparse(node) in ("sys.stdout", "sys.stderr")


def test_only_three_modules_write_to_a_terminal():
    writers = {
        file.relative_to(PACKAGE).as_posix()
        for file in PACKAGE.rglob("*.py")
        if any(map(writes_to_a_terminal, ast.walk(ast.parse(file.read_text(encoding="utf-8")))))
    }
    # the harness prints, and stdout is for results
    assert writers - {"evaluation/lm_eval.py"} == OUTPUT


def test_raw_text_is_found_wherever_it_is_printed():
    for text in (
        "print(x)",
        "click.echo(x)",
        "from click import echo",
        "from sys import stdout",
        "import rich.console",
        "def f():\n    from rich import print",
        "sys.stderr.write(x)",
    ):
        assert any(map(writes_to_a_terminal, ast.walk(ast.parse(text)))), text
    assert not any(map(writes_to_a_terminal, ast.walk(ast.parse("echo(x)\nsys.stdin.read()"))))
