"""Words of earlier versions that readers had to translate stay out of library, help and docs."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
# By a part of the word, in lower case, which says quickly that a file does not have it.
RETIRED = {
    "leg": r"\blegs?\b",  # a phase
    "course": r"(?<!of )\bcourses?\b",  # a phased dataset
    "mended": r"\bmended\b",  # fixed
    # rejected; ``refusal`` is a field of OpenAI's API
    "refus": r"\brefus(e|es|ed|als)\b|(?<![.\"'`])\brefusal\b(?!\": none|: (str|text))",
    "by turns": r"\bby turns\b",  # alternating
    "to the bit": r"\bto the bit\b",  # bit-identical
    "whole": r"\bwhole,? or not at all\b|\b(brings?|brought)\b.{0,12}whole",  # atomic; full tensors
    " kin": r"\b(its|their) kin\b",  # similar
    "unsaid": r"\bunsaid\b",  # default
    "told": r"\bunless told\b|\btold otherwise\b|\bas told\b[^,\n]",  # specified
    "unless said": r"\bunless said\b",
    "as asked": r"\bas asked\b[^,\n]",
    "judge": r"\bjudged?\b",  # evaluated
    "unbroken": r"\bunbroken\b",  # uninterrupted
    "as shipped": r"\bas shipped\b",  # stock
    "price": r"\bprice\b",  # a trade-off
    "not there yet": r"\bnot there yet\b",  # a known limitation
    "stand": r'(?<!""")\bstands? (in|at|beside|there|here|behind|before)\b',  # is
    "weights": r"\bweights (that )?learn\b",  # trainable
    "lane": r"\blanes?\b",  # a stream of a CPU; a lane is one of a simdgroup or a warp
}
OF_KERNELS = re.compile(r"^(kernels|mlx_packs/ops)/|^docs/kernels\.md$")
# Participles as names say nothing of their content.
NAMES = re.compile(r"^ *(found|told|said|made|given|gave|held|judged)(:[^=\n]+)? (\+|\|)?= ", re.M)


def places(text: str, retired: dict[str, str]) -> list[str]:
    """The lines of a text that have a retired word."""
    lowered = text.lower()
    found = [
        match
        for part, pattern in retired.items()
        if part in lowered
        for match in re.finditer(pattern, lowered)
    ]
    lines = text.splitlines()
    return [lines[text.count("\n", 0, m.start())] for m in [*found, *NAMES.finditer(text)]]


def test_retired_words_do_not_come_back():
    assert len(places("Mended, of course, and\n    found = it stands for 1", RETIRED)) == 2

    folders = ("mlx_packs", "docs", "examples", "kernels", "benchmarks")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*")]
    used = {}
    for file in [*files, *ROOT.glob("*.md")]:
        name = file.relative_to(ROOT).as_posix()
        if file.suffix not in (".py", ".md", ".jinja", ".yaml", ".metal", ".cu"):
            continue
        if "data" in file.parts[-2:-1]:
            continue
        retired = RETIRED | ({"lane": "(?!)"} if OF_KERNELS.search(name) else {})
        used[name] = places(file.read_text(encoding="utf-8"), retired)

    assert len(used) > 250
    assert not {name: lines for name, lines in used.items() if lines}
