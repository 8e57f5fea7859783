"""Arithmetic word problems with one right answer each, made by a script.

No held-out problem is a training problem, though its numbers are.
"""

import json
import random
from pathlib import Path

NAMES = "Ann Ben Cora Dan Eva Finn Gus Hana Ivo June Kim Leo".split()
THINGS = "apples books coins eggs keys nuts pens shells stones stamps".split()
NUMBERS = range(2, 12)
# How a problem is told, and what is added.
STORIES = (
    ("{name} has {a} {thing} and finds one more. How many {thing} does {name} have?", 1),
    ("{name} had {a} {thing} and lost one. How many {thing} are left?", -1),
    ("There are {a} {thing}. {name} adds two. How many {thing} are there?", 2),
    ("Of {a} {thing}, {name} gives two away. How many {thing} does {name} keep?", -2),
)


def problem(rng: random.Random) -> dict[str, str]:
    """Return one problem as a prompt with its completion."""
    story, added = rng.choice(STORIES)
    a = rng.choice(NUMBERS)
    prompt = story.format(name=rng.choice(NAMES), thing=rng.choice(THINGS), a=a)
    return {"prompt": prompt, "completion": str(a + added)}


def write_problems(folder: Path, train: int = 2000, held_out: int = 100, seed: int = 0) -> Path:
    """Write train, valid and test as JSONL; no prompt is in two of them."""
    rng, seen = random.Random(seed), set()
    folder.mkdir(parents=True)
    for split, count in (("test", held_out), ("valid", held_out), ("train", train)):
        rows = []
        while len(rows) < count:
            row = problem(rng)
            if row["prompt"] not in seen:
                seen.add(row["prompt"])
                rows.append(row)
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(text, encoding="utf-8")
    return folder
