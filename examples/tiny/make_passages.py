"""Makes the data set of the benchmarks: passages of the King James Bible as short chats.

The user gives the beginning of a passage, the assistant answers with the words that follow; some
rows go on for two or three turns. Whole books are held out for validation and test. The King James
Bible repeats itself, so held-out rows that share ten words in a row with a training row are
dropped. At the end the script reads the written files again and proves that the splits are
disjoint; it exits with 1 if they are not. The same seed gives the same bytes.

    python make_passages.py

Needs the Debian packages bible-kjv and bible-kjv-text.
"""

import argparse
import json
import random
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from corpus import kjv_verses, word_runs

HERE = Path(__file__).resolve().parent
HELD_OUT = {
    "valid": {"Jdgs": "Judges", "Lam": "Lamentations", "Phi": "Philippians", "Jas": "James"},
    "test": {
        "Ruth": "Ruth",
        "Eccl": "Ecclesiastes",
        "Dan": "Daniel",
        "Jonah": "Jonah",
        "Heb": "Hebrews",
    },
}
ASK = (
    "Continue: ",
    "Continue the passage: ",
    "What comes next? ",
    "Go on from here: ",
    "Finish this: ",
)
ASK_MORE = ("Go on.", "Continue.", "And then?")
MIN_ANSWER, MAX_ANSWER = 80, 400  # characters; about 25 to 120 tokens of the tiny base
RUN = 10  # words in a row that no two splits may share
HELD_OUT_ROWS, MAX_TRAIN_ROWS, MAX_BYTES = 200, 5000, 2_000_000

Row = dict[str, list[dict[str, str]]]


def pieces(verses: list[str]) -> list[str]:
    """A chapter in pieces: verses, long ones cut behind a colon or semicolon, short ones joined."""
    parts_of_chapter: list[str] = []
    for verse in verses:
        verse = re.sub(r"\s+", " ", verse)
        parts = re.split(r"(?<=[:;]) ", verse) if len(verse) > MAX_ANSWER // 2 else [verse]
        for part in parts:
            if parts_of_chapter and len(parts_of_chapter[-1]) < MIN_ANSWER:
                parts_of_chapter[-1] += " " + part
            else:
                parts_of_chapter.append(part)
    return parts_of_chapter


def chapter_rows(verses: list[str], rng: random.Random) -> Iterator[Row]:
    """Rows that cover a chapter once, from its first verse to its last."""
    left = pieces(verses)
    while len(left) >= 2:
        ask = rng.choice(ASK)
        messages = [{"role": "user", "content": ask + left.pop(0)}]
        turns = rng.choice((2, 3)) if rng.random() < 0.2 else 1
        for turn in range(turns):
            if not left:
                break
            if turn:
                messages.append({"role": "user", "content": rng.choice(ASK_MORE)})
            answer, wanted = left.pop(0), rng.uniform(MIN_ANSWER, MAX_ANSWER * 0.8)
            while left and len(answer) < wanted and len(answer) + len(left[0]) < MAX_ANSWER:
                answer += " " + left.pop(0)
            messages.append({"role": "assistant", "content": answer})
        answers = [m["content"] for m in messages if m["role"] == "assistant"]
        if all(MIN_ANSWER <= len(answer) <= MAX_ANSWER for answer in answers):
            yield {"messages": messages}


def passage(row: Row) -> str:
    """The words of the Bible in a row, without the instructions."""
    parts = []
    for message in row["messages"]:
        text = message["content"]
        if message["role"] == "user":
            if text in ASK_MORE:
                continue
            text = text.removeprefix(next(ask for ask in ASK if text.startswith(ask)))
        parts.append(text)
    return " ".join(parts)


def runs_of(rows: list[Row]) -> set[tuple[str, ...]]:
    """Every sequence of RUN words that occurs in a passage of the rows."""
    return {run for row in rows for run in word_runs(passage(row), RUN)}


def to_line(row: Row) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def split_of(book: str) -> str:
    return next((name for name, books in HELD_OUT.items() if book in books), "train")


def make_rows(seed: int) -> dict[str, list[Row]]:
    """The rows of the three splits, disjoint and cut to size."""
    rng = random.Random(seed)
    rows: dict[str, list[Row]] = {"train": [], "valid": [], "test": []}
    for (book, _), verses in groupby(kjv_verses(), key=lambda verse: verse[:2]):
        rows[split_of(book)] += chapter_rows([text for *_, text in verses], rng)
    for part in rows.values():
        rng.shuffle(part)
    # Training rows first: what may stay in the held-out splits depends on them.
    room = MAX_BYTES - 2 * HELD_OUT_ROWS * 700
    train: list[Row] = []
    for row in rows["train"][:MAX_TRAIN_ROWS]:
        room -= len(to_line(row).encode())
        if room < 0:
            break
        train.append(row)
    taken = runs_of(train)
    for name in ("valid", "test"):
        kept: list[Row] = []
        for row in rows[name]:
            if len(kept) < HELD_OUT_ROWS and not runs_of([row]) & taken:
                kept.append(row)
        rows[name] = kept
        taken |= runs_of(kept)
    return {**rows, "train": train}


def prove(folder: Path) -> dict[str, dict[str, int]]:
    """Check every promise on the written files; returns the counts, exits with 1 on a fault."""
    rows = {
        name: [
            json.loads(line)
            for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        for name in ("train", "valid", "test")
    }
    texts = {name: "" for name in rows}
    for book, verses in groupby(kjv_verses(), key=lambda verse: verse[0]):
        texts[split_of(book)] += re.sub(r"\s+", " ", " ".join(text for *_, text in verses)) + "\n"
    faults = []
    for name, part in rows.items():
        strangers = sum(passage(row) not in texts[name] for row in part)
        if strangers:
            faults.append(f"{strangers} rows of {name} are not in a book of {name}")
    for one, other in (("train", "valid"), ("train", "test"), ("valid", "test")):
        shared = len(runs_of(rows[one]) & runs_of(rows[other]))
        print(f"{one} and {other}: {shared} shared sequences of {RUN} words")
        if shared:
            faults.append(f"{one} and {other} share {shared} sequences of {RUN} words")
        answers = {
            m["content"] for row in rows[one] for m in row["messages"] if m["role"] == "assistant"
        }
        repeated = sum(m["content"] in answers for row in rows[other] for m in row["messages"])
        if repeated:
            faults.append(f"{repeated} answers of {other} occur in {one}")
    for name in ("valid", "test"):
        if len(rows[name]) != HELD_OUT_ROWS:
            faults.append(f"{name} has {len(rows[name])} rows instead of {HELD_OUT_ROWS}")
    counts = {}
    for name, part in rows.items():
        answers = [
            m["content"] for row in part for m in row["messages"] if m["role"] == "assistant"
        ]
        counts[name] = {
            "rows": len(part),
            "multi_turn": sum(len(row["messages"]) > 2 for row in part),
            "answers": len(answers),
            "answer_words": sum(len(answer.split()) for answer in answers),
            "bytes": (folder / f"{name}.jsonl").stat().st_size,
        }
        print(name, counts[name])
    total = sum(count["bytes"] for count in counts.values())
    if total > MAX_BYTES:
        faults.append(f"the files have {total} bytes, more than {MAX_BYTES}")
    if faults:
        raise SystemExit("make_passages: " + "; ".join(faults))
    print(f"proved: disjoint, whole books, {total:,} bytes")
    return counts


README = """# The passages: the data set of the benchmarks

Passages of the King James Version of the Bible as short chats: the user gives the beginning of a
passage, the assistant answers with the words that follow. The tiny base has not seen this text, so
a pack trained on it has something to learn, and everyone can hear whether it learned.

Format: one JSON object a line, `{{"messages": [{{"role": "user", "content": ...}},
{{"role": "assistant", "content": ...}}]}}`.

| split | rows | of these multi-turn | answers | words in answers | bytes | books |
|---|---|---|---|---|---|---|
{table}

- **Source:** Debian's package `bible-kjv-text` (printed by `bible` of `bible-kjv`): the Authorized
  Version of 1611 in modern spelling.
- **Licence:** public domain. (In the United Kingdom the Crown keeps a printing right to it.)
- **Splits:** whole books. Held-out rows that share {run} words in a row with a training row were
  dropped, since the books quote and repeat each other; no {run}-word sequence occurs in two splits.
- **Made by** `python examples/tiny/make_passages.py` (seed 0, same bytes every time), which proves the
  above on the written files.
"""


def write_readme(folder: Path, counts: dict[str, dict[str, int]]) -> None:
    books = {
        name: ", ".join(HELD_OUT.get(name, {}).values()) or "all other 57 books" for name in counts
    }
    lines = [
        f"| {name} | {c['rows']:,} | {c['multi_turn']:,} | {c['answers']:,} "
        f"| {c['answer_words']:,} | {c['bytes']:,} | {books[name]} |"
        for name, c in counts.items()
    ]
    (folder / "README.md").write_text(
        README.format(table="\n".join(lines), run=RUN), encoding="utf-8"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=HERE.parents[1] / "benchmarks" / "passages")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name, rows in make_rows(args.seed).items():
        (args.out / f"{name}.jsonl").write_text("".join(map(to_line, rows)), encoding="utf-8")
    write_readme(args.out, prove(args.out))


if __name__ == "__main__":
    main()
