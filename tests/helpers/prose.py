"""Rules of prose for README, docs and help: what a native technical writer would not write.

A rule is a regular expression, or a limit on the length of sentences.

    python -m tests.helpers.prose docs/data.md README.md    # its hits, line by line
"""

import re
import statistics
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from tests.helpers import documents

WORDS = 25  # of a sentence, in the mean of a page
_SENTENCES = re.compile(r"(?<=[.?!])\s+(?=[A-Z`\"'*(0-9])")
_CODE = "`x`"  # in the place of code, which is no prose
_AMOUNT = r"(tokens?|bytes|[KMG]B|steps?|updates?|batch(es)?|requests?|rows?|examples?|runs?|answers?)"
RULES = {
    "repeat the noun, not: that of, those of": re.compile(r"\b(that|those) of\b", re.I),
    "use, not: take": re.compile(r"(^|[.:;] )Take\b"),
    "if or when, not: where at the beginning": re.compile(r"(^|[.:;] )Where\b"),
    "only x, not: x alone": re.compile(r"(?<!stand)(?<!stands)(?<!leave)(?<!let) alone\b(?! in)", re.I),
    "per second, not: a second": re.compile(rf"\b{_AMOUNT} an? (second|minute|hour|step|token|row|batch)\b"),
    "19x faster, not: 19 times as fast": re.compile(r"\btimes as (fast|slow|long|large|many|much)\b", re.I),
    "do not front: of": re.compile(r"(^|[.:;] )Of (a|an|the|each|every|its|these|those|two|three|all)\b"),
    "start or continue, not: begin, go on, go with, come back": re.compile(
        r"\b(begins?|began|begun|beginnings?|(go|goes|went|going) (on|with)|(come|comes|came) back)\b", re.I
    ),
    "N, not: so many, that many": re.compile(r"\b(so|that|as) (many|much)\b(?! (more|less|as)\b)", re.I),
    "alongside or in addition to, not: beside": re.compile(r"\bbeside\b", re.I),
}
HEADING = re.compile(r"^(What|How)\b")


class Hit(NamedTuple):
    """A place that a rule forbids."""

    line: int
    rule: str
    text: str


def passages(page: documents.Document) -> Iterator[tuple[int, bool, str]]:
    """Line, whether it is a heading, and text of each paragraph, item, cell and heading."""
    for before, token in pairwise(page.tokens):
        if token.type != "inline":
            continue
        text = "".join(
            {"code_inline": _CODE, "softbreak": " ", "hardbreak": " "}.get(part.type, part.content)
            for part in token.children or []
        )
        yield (token.map or [0])[0] + 1, before.type == "heading_open", text


def hits(page: documents.Document) -> Iterator[Hit]:
    """The places of a page that a rule forbids."""
    for line, is_heading, text in passages(page):
        if is_heading and HEADING.search(text):
            yield Hit(line, "a noun as a heading, not: What, How", text)
        for rule, pattern in RULES.items():
            for found in pattern.finditer(text):
                yield Hit(line, rule, text[max(found.start() - 40, 0) : found.end() + 40])


def mean_words(page: documents.Document) -> float:
    """The mean number of words of the sentences of a page; cells and headings are none."""
    lengths = []
    for _, is_heading, text in passages(page):
        if is_heading or not text.endswith((".", ":")):
            continue
        lengths += [len(sentence.split()) for sentence in _SENTENCES.split(text)]
    return statistics.mean(lengths) if lengths else 0.0


def main() -> int:
    """Print the hits of the pages that are named, and the mean length of their sentences."""
    for path in sys.argv[1:]:
        page = documents.read(path)
        for hit in hits(page):
            print(f"{path}:{hit.line}: {hit.rule}: …{hit.text}…")
        print(f"{path}: {mean_words(page):.1f} words a sentence")
    return 0


if __name__ == "__main__":
    sys.exit(main())
