"""Words of earlier versions that readers had to translate stay out of library, help and docs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RETIRED = {
    "legs, which are phases": re.compile(r"\blegs?\b", re.I),
    "courses, which are phased datasets": re.compile(r"(?<!of )\bcourses?\b", re.I),
    "mended, which is fixed": re.compile(r"\bmended\b", re.I),
    "participles as names, which say nothing of their content": re.compile(
        r"^\s*(found|told|said|made|given|gave|held|judged)(:[^=\n]+)? (\+|\|)?= "
    ),
    # ``refusal`` is a field of OpenAI's API
    "refused, which is rejected": re.compile(
        r"\brefus(e|es|ed|als)\b|(?<![.\"'`])\brefusal\b(?!\": None|: str)", re.I
    ),
    "by turns, which is alternating": re.compile(r"\bby turns\b", re.I),
    "to the bit, which is bit-identical": re.compile(r"\bto the bit\b", re.I),
    "whole or not at all, which is atomic": re.compile(r"\bwhole,? or not at all\b", re.I),
    "its kin, which is similar": re.compile(r"\b(its|their) kin\b", re.I),
    "unsaid and told, which are default and specified": re.compile(
        r"\bunsaid\b|\bunless (told|said)\b|\btold otherwise\b|\bas (told|asked)\b[^,]", re.I
    ),
    "judged, which is evaluated": re.compile(r"\b[Jj]udged?\b"),
    "unbroken, which is uninterrupted": re.compile(r"\bunbroken\b", re.I),
    "brings whole, which stores full tensors": re.compile(
        r"\b(brings?|brought)\b.{0,12}whole", re.I
    ),
    "as shipped, which is stock": re.compile(r"\bas shipped\b", re.I),
    "a price, which is a trade-off": re.compile(r"\b[Pp]rice\b"),
    "not there yet, which are known limitations": re.compile(r"\bnot there yet\b", re.I),
    "stands, which is where a thing is": re.compile(
        r"\bstands? (in|at|beside|there|here|behind|before)\b"
    ),
    "weights that learn, which are trainable": re.compile(r"\bweights (that )?learn\b", re.I),
}
# A lane is one of a simdgroup or a warp; the pieces of a CPU's work run on streams.
LANES = re.compile(r"\blanes?\b", re.I)
OF_KERNELS = re.compile(r"^(kernels|mlx_packs/ops)/|^docs/kernels\.md$")


def files() -> list[str]:
    folders = ("mlx_packs", "docs", "examples", "kernels", "benchmarks")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    paths += ROOT.glob("*.md")
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
    name = RETIRED["participles as names, which say nothing of their content"]
    assert name.search("    found = 1") and name.search("found: list[int] = []")
    assert name.search("    given |= {}") and not name.search("it is found == here")
    assert RETIRED["a price, which is a trade-off"].search("Price: one pass")
    stands = RETIRED["stands, which is where a thing is"]
    assert stands.search("stands in the file") and not stands.search("it stands for it")
    pattern = RETIRED["unsaid and told, which are default and specified"]
    assert (
        pattern.search("unless said.")
        and pattern.search("as asked.")
        and not pattern.search("it told us")
    )
    assert len(files()) > 250
