"""Take the upper bounds of dependencies out of pyproject.toml, to try the newest; CI does so weekly."""

import re
from pathlib import Path

FILE = Path(__file__).parents[1] / "pyproject.toml"


def lifted(text: str) -> str:
    """Return a pyproject.toml whose dependencies have no ``<`` bound."""
    begin = text.index("\ndependencies = [")
    end = text.index("\n]", begin)
    dependencies = re.sub(r",?<[\d.]+", "", text[begin:end])
    return text[:begin] + dependencies + text[end:]


if __name__ == "__main__":
    FILE.write_text(lifted(FILE.read_text(encoding="utf-8")), encoding="utf-8")
