"""The limits of tests/budgets.toml, which only shrink.

python -m tests.helpers.budgets    # lower the limits to what is measured
"""

import re
import sys
from pathlib import Path
from typing import Any

from tests.helpers.imports import closure
from tests.helpers.readability import figures
from tests.helpers.size import lines_by_package, totals

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
