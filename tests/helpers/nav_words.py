"""Words of the documentation by section of the site's nav: pages for users against maintainers.

    python -m tests.helpers.nav_words           # a line a section, with its pages
    python -m tests.helpers.nav_words --total   # only the sums

Words are those of `wc -w`, tables and code included. Pages that are generated from the code when
the site is built count as they are in the repository, and notebooks do not count. The first page
shows most of the README, whose words count for it.
"""

import re
import sys
from collections.abc import Iterator

from tests.helpers.documents import ROOT

MAINTAINERS = {"Project"}
_LINE = re.compile(r"^( *)- (?:\"([^\"]+)\"|([^:#]+)):(?: (\S+\.md))?$")


def pages() -> Iterator[tuple[str, str]]:
    """Section and path of each page of the nav."""
    nav = (ROOT / "mkdocs.yml").read_text("utf-8").split("\nnav:\n")[1]
    section = ""
    for line in nav.splitlines():
        if match := _LINE.match(line):
            _, quoted, plain, page = match.groups()
            if page is None:
                section = quoted or plain
            else:
                in_docs = ROOT / "docs" / page
                yield section, f"docs/{page}" if in_docs.is_file() else page


def main() -> int:
    """Print the words of each section, then of users and maintainers."""
    sums = {"users": 0, "maintainers": 0}
    by_section: dict[str, list[tuple[str, int]]] = {}
    for section, page in pages():
        shown = [page, "README.md"] if page == "docs/index.md" else [page]
        words = sum(len((ROOT / name).read_text("utf-8").split()) for name in shown)
        by_section.setdefault(section, []).append((page, words))
        sums["maintainers" if section in MAINTAINERS else "users"] += words

    for section, counted in by_section.items():
        if "--total" not in sys.argv:
            print(f"{section}: {sum(words for _, words in counted):,} ({len(counted)} pages)")
            for page, words in counted:
                print(f"    {words:6,} {page}")
    print(" · ".join(f"{name} {words:,}" for name, words in sums.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
