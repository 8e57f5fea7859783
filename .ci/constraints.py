"""Write constraints.txt: the versions, installed here, of all that ``.[test,dev]`` brings.

    .venv/bin/python .ci/constraints.py

Run it with Python 3.11 or later, after all of `PIP_CONSTRAINT= .ci/run` has passed.
"""

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import tomllib
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
HEAD = """\
# The versions that were tested together, on Linux and Python 3.11; `.ci/run` installs them.
# Written by .ci/constraints.py. Older Pythons take what pip finds within pyproject.toml's bounds.
"""


def installed(requirements: list[str]) -> dict[str, str]:
    """Return name and version of every installed package that requirements lead to."""
    versions: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [(text, "") for text in requirements]
    while waiting:
        text, extra = waiting.pop()
        needed = Requirement(text)
        if (text, extra) in seen or not applies(needed, extra):
            continue
        seen.add((text, extra))
        try:
            package = distribution(needed.name)
        except PackageNotFoundError:
            continue  # an optional tool
        versions[canonicalize_name(needed.name)] = package.version
        waiting += [(t, e) for t in package.requires or () for e in ("", *needed.extras)]
    return versions


def applies(requirement: Requirement, extra: str) -> bool:
    """Return whether a requirement is one here, as one of an extra or of none."""
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def main() -> None:
    """Write the file."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    own = f"{project['name']}["  # one extra names another, as mlx-packs[serve]
    extras = [text for name in ("test", "serve", "dev") for text in optional[name]]
    needed = [text for text in extras if not text.startswith(own)]
    versions = installed([*project["dependencies"], *needed])
    lines = [f"{n}=={v}; python_version >= '3.11'\n" for n, v in sorted(versions.items())]
    (ROOT / "constraints.txt").write_text(HEAD + "".join(lines), encoding="utf-8")
    print(f"constraints.txt: {len(lines)} packages")


if __name__ == "__main__":
    main()
