"""Words of earlier versions that readers had to translate stay out of library, help and docs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RETIRED = {
    "legs, which are phases": re.compile(r"\blegs?\b", re.I),
    "courses, which are phased datasets": re.compile(r"(?<!of )\bcourses?\b", re.I),
    "mended, which is fixed": re.compile(r"\bmended\b", re.I),
    "found as a name, which says nothing of its content": re.compile(r"\bfound(:[^=\n]+)? \+?= "),
}
# A lane is one of a simdgroup or a warp; the pieces of a CPU's work run on streams.
LANES = re.compile(r"\blanes?\b", re.I)
OF_KERNELS = re.compile(r"^(kernels|mlx_packs/ops)/|^docs/kernels\.md$")


def files() -> list[str]:
    folders = ("mlx_packs", "docs", "examples", "kernels")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    paths += [*ROOT.glob("*.md"), ROOT / "benchmarks" / "README.md"]
    kept = [p for p in paths if p.suffix in (".py", ".md", ".jinja", ".yaml", ".metal", ".cu")]
    return [p.relative_to(ROOT).as_posix() for p in kept if "data" not in p.parts[-2:-1]]


@pytest.mark.parametrize("word", [*RETIRED, "lanes outside of kernels"])
def test_retired_words_do_not_come_back(word):
    pattern, used = RETIRED.get(word, LANES), []
    for file in files():
        if pattern is LANES and OF_KERNELS.search(file):
            continue
        lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
        used += [
            f"{file}:{n}: {line.strip()}" for n, line in enumerate(lines, 1) if pattern.search(line)
        ]
    assert not used


def test_the_words_are_recognized():
    assert RETIRED["mended, which is fixed"].search("what was Mended")
    assert not RETIRED["courses, which are phased datasets"].search("of course")
    name = RETIRED["found as a name, which says nothing of its content"]
    assert name.search("    found = 1") and name.search("found: list[int] = []")
    assert not name.search("it is found == here") and len(files()) > 250
