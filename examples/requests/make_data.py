"""Make this data set from a clone of https://github.com/sonos/nlu-benchmark.

python examples/requests/make_data.py ~/nlu-benchmark
"""

import json
import random
import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
FOLDER = "2017-06-custom-intent-engines"
TRAIN, VALID, TEST = 1200, 100, 200  # examples of a split


def examples(folder: Path, kind: str) -> list[dict[str, str]]:
    """Return the requests of all intents, each with its JSON object, in random order."""
    rows = []
    for path in sorted(folder.glob(f"*/{kind}_*.json")):
        intent = path.parent.name
        if path.name != f"{kind}_{intent}.json":
            continue  # a larger file of the same intent

        for request in json.loads(path.read_text("utf-8"))[intent]:
            parts = request["data"]
            slots = [(part["entity"], part["text"].strip()) for part in parts if "entity" in part]
            if len(dict(slots)) == len(slots):  # no slot is there twice
                answer = json.dumps({"intent": intent, **dict(slots)}, ensure_ascii=False)
                text = "".join(part["text"] for part in parts).strip()
                rows.append({"prompt": text, "completion": answer})

    random.Random(0).shuffle(rows)
    return rows


def repeats(row: dict[str, str], others: list[set[tuple]]) -> bool:
    """Return whether half of the runs of five words of a row are in one of the others."""
    of_row = runs(row)
    return any(len(of_row & other) >= len(of_row) / 2 for other in others)


def runs(row: dict[str, str]) -> set[tuple]:
    words = re.findall(r"\w+", f"{row['prompt']} {row['completion']}".lower())
    return set(zip(*(words[i:] for i in range(5)), strict=False))


def main(clone: str) -> None:
    """Write train.jsonl, valid.jsonl and test.jsonl, which repeat nothing of training."""
    train = examples(Path(clone) / FOLDER, "train")
    seen = [runs(row) for row in train[:TRAIN]]
    valid = [row for row in train[TRAIN:] if not repeats(row, seen)]
    test = [row for row in examples(Path(clone) / FOLDER, "validate") if not repeats(row, seen)]

    splits = {"train": train[:TRAIN], "valid": valid[:VALID], "test": test[:TEST]}
    for name, rows in splits.items():
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        (HERE / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
