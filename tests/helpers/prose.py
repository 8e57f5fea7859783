"""Rules of prose for README, docs and help: plain English, as a native technical writer has it.

A rule is a regular expression with an example of what it finds. A page also has a limit on the
mean length of its sentences.

    python -m tests.helpers.prose docs/data.md README.md    # what breaks a rule, line by line
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
_GENERATED = re.compile(r"<!-- measured: .*?<!-- end of measured -->", re.S)  # of stored records
_START = r"(?:^|[.:;] )"  # of a sentence or a cell
_AMOUNT = (
    r"(?:seconds?|tokens?|bytes|[KMG]B|steps?|updates?|batch(?:es)?|requests?|rows?|examples?|runs?"
    r"|nats|answers?)"
)


class Rule(NamedTuple):
    """What a text must not have, with an example that breaks it and one that is good English."""

    pattern: re.Pattern[str]
    bad: str
    good: str


class Break(NamedTuple):
    """A place that breaks a rule."""

    line: int
    rule: str
    text: str


def _rule(pattern: str, bad: str, good: str, flags: re.RegexFlag = re.I) -> Rule:
    return Rule(re.compile(pattern, flags), bad, good)


RULES = {
    "P1: repeat the noun, or use its; not: that of, those of": _rule(
        r"\b(?:that|those) of\b", "The loss is that of plain MLX.", "The loss equals plain MLX's."
    ),
    "P2: use, for advice; not: take": _rule(
        _START + r"Take\b", "Take it when a run is slow.", "Use it if a run is slow.", re.M
    ),
    "P2: if or when, for a condition; not: where": _rule(
        # A question is no condition, nor is "where" after a noun that is a place.
        _START + r"Where\b(?![^.?]*\?)",
        "Where it fits, it is dense.",
        "In the folder where it is, it fits.",
        re.M,
    ),
    "P3: only X; not: X alone": _rule(
        # "stands alone" and "left alone" are idioms; "alone in" is about a place.
        r"(?<!stand)(?<!stands)(?<!leave)(?<!left)(?<!let) alone\b(?! in)",
        "Embeddings have LoRA alone.",
        "A line stands alone.",
    ),
    "P4: per second; not: a second": _rule(
        rf"\b{_AMOUNT} an? (?:second|minute|hour|step|token|row|batch|update)\b",
        "It trains 100 tokens a second.",
        "It trains 100 tokens per second.",
    ),
    "P4: 19x faster; not: 19 times as fast": _rule(
        r"\btimes as (?:fast|slow|long|large|many|much)\b",
        "It is 3 times as fast.",
        "It is 3x faster.",
    ),
    "P5: do not start with: of": _rule(
        # "Of the 30 requests, 2 failed" is good English: the rest is a part of a number.
        _START + r"Of (?:an?|the|each|every|its|these|those|all) (?!\d|other)",
        "Of a folder the test split is read.",
        "Of the 30 requests, 2 failed.",
        re.M,
    ),
    "P6: start or continue, work with, return; not: begin, go on, go with, come back": _rule(
        r"\b(?:begins?|began|begun|beginnings?|beginning"
        r"|(?:go|goes|went|going|gone) (?:on|with)(?! to\b)|(?:come|comes|came) back)\b",
        "The run goes on where it began.",
        "The run continues from its start.",
    ),
    "P7: a noun; not a clause with: what": _rule(
        # A question is no clause. "what to do" and "what is wrong" are idioms.
        rf"{_START}(?:What|Whatever)\b(?! to\b| is wrong)(?![^.?]*\?)"
        r"|\b(?:is|are|of|than|by|with|from|says?|shows?|prints?|names?|reads?|lists?|has|have)"
        r" what(?:ever)?\b(?! to\b| is wrong)",
        "It prints what is left.",
        "It says what to do.",
    ),
    "P8: N; not: so many, that many, or as many without a second as": _rule(
        r"\b(?:so|that) (?:many|much)\b(?! that)|\bas (?:many|much)\b(?! as)(?!(?: [^\s.,;:]+){1,4} as\b)",
        "It saves once in so many batches.",
        "It takes as many examples as fit.",
    ),
    "P10: alongside, next to or in addition to; not: beside": _rule(
        r"\bbeside\b", "The head is trained beside adapters.", "The head is trained, too."
    ),
    "P10: needs or uses memory; not: takes": _rule(
        # A time is taken: "takes 2 minutes" is good English.
        r"\b(?:takes?|took|taken) (?:(?:up to|about|at most|only) )?"
        r"(?:[\d.,]+ (?:[KMG]i?B|bytes|bits)\b|(?:\w+ ){0,2}(?:of the )?memory\b)",
        "An example takes 100 bytes.",
        "A step takes 2 s.",
    ),
}
NOUN = "P7: a noun as a heading; not: What, How"
HEADING = _rule(
    r"^(?:What|How|Where|When|Which|Who)\b(?![^?]*\?)", "How fast it is", "Throughput", re.M
)


def breaks(text: str) -> Iterator[tuple[str, str]]:
    """The rules that a text breaks, each with the place."""
    for rule, (pattern, _, _) in RULES.items():
        for match in pattern.finditer(text):
            yield rule, f"…{text[max(match.start() - 40, 0) : match.end() + 40]}…"


def breaks_of_page(page: documents.Document) -> Iterator[Break]:
    """The places of a page that break a rule."""
    for line, is_heading, text in _passages(page):
        if is_heading and HEADING.pattern.search(text):
            yield Break(line, NOUN, text)
        for rule, place in breaks(text):
            yield Break(line, rule, place)


def mean_words(page: documents.Document) -> float:
    """The mean number of words of the sentences of a page; cells and headings are none."""
    lengths = []
    for _, is_heading, text in _passages(page):
        if is_heading or not text.endswith((".", ":")):
            continue
        lengths += [len(sentence.split()) for sentence in _SENTENCES.split(text)]
    return statistics.mean(lengths) if lengths else 0.0


def _passages(page: documents.Document) -> Iterator[tuple[int, bool, str]]:
    """Line, whether it is a heading, and text of each paragraph, item, cell and heading."""
    if _GENERATED.search(page.text):
        written = _GENERATED.sub(lambda block: "\n" * block[0].count("\n"), page.text)
        page = documents.parse(page.path, written)
    for before, token in pairwise(page.tokens):
        if token.type != "inline":
            continue
        text = "".join(
            {"code_inline": _CODE, "softbreak": " ", "hardbreak": " "}.get(part.type, part.content)
            for part in token.children or []
        )
        yield (token.map or [0])[0] + 1, before.type == "heading_open", text


def main() -> int:
    """Print what breaks a rule in the pages that are named, and the mean length of sentences."""
    for path in sys.argv[1:]:
        page = documents.read(path)
        for line, rule, place in breaks_of_page(page):
            print(f"{path}:{line}: {rule}: {place}")
        print(f"{path}: {mean_words(page):.1f} words per sentence")
    return 0


if __name__ == "__main__":
    sys.exit(main())
