"""How large the package is: what the caps of tests/budgets.toml hold."""

import re
from collections import Counter
from pathlib import Path

from tests.helpers.imports import PACKAGE, TABLES, modules_in_strings, written_files

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
        "strings_that_name_modules": sum(n for name, n in strings.items() if name not in TABLES),
    }
