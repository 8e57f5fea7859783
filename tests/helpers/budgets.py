"""The limits of tests/budgets.toml, which only shrink.

python -m tests.helpers.budgets    # lower the limits to what is measured
"""

import re
import sys
from pathlib import Path
from typing import Any

from tests.helpers.imports import closure
from tests.helpers.readability import figures

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # which pytest needs there

FILE = Path(__file__).parents[1] / "budgets.toml"


def limits() -> dict[str, dict[str, Any]]:
    """The limits by section."""
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def exceeded(name: str, value: float, limit: float) -> bool:
    """Whether a figure is on the wrong side of its limit."""
    return value < limit if name.startswith("least_") else value > limit


def lowered(section: dict[str, float], measured: dict[str, float]) -> dict[str, float]:
    """The limits of a section, the better of each and what is measured."""
    return {
        name: limit if exceeded(name, measured[name], limit) else measured[name]
        for name, limit in section.items()
    }


def main() -> int:
    """Write the lower limits, and leave comments and order as they are."""
    text, now = FILE.read_text(encoding="utf-8"), limits()
    measured = {name: float(len(closure(name))) for name in now["closures"]}
    new = lowered(now["closures"], measured) | lowered(now["readability"], figures())
    for name, value in new.items():
        text = re.sub(rf'(?m)^("?{re.escape(name)}"? = )[\d.]+', rf"\g<1>{value:g}", text)
    FILE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
