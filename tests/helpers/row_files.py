"""A hundred questions and answers, in each of the forms in which people have them."""

import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path

ROOMS = ("kitchen", "attic", "cellar", "hall", "study")
QA = [
    (f"What is in box {i} of the {ROOMS[i % 5]}?", f"Box {i} holds {i * 7 % 13} books, and a lamp.")
    for i in range(100)
]


def _jsonl(rows: list) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _roles(*names: str) -> Callable[[str, str], list]:
    keys = ("from", "value") if names[0] in ("human", "system") else ("role", "content")
    return lambda q, a: [
        dict(zip(keys, pair, strict=True)) for pair in zip(names, (q, a), strict=True)
    ]


_CHAT, _SHARE = _roles("user", "assistant"), _roles("human", "gpt")


def _parts(q: str, a: str) -> list:
    return [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in _CHAT(q, a)]


# Name of the file -> the rows, or the text.
FILES = {
    "alpaca.jsonl": [{"instruction": q, "input": "", "output": a} for q, a in QA],
    "alpaca.json": [{"instruction": "Answer.", "input": q, "output": a} for q, a in QA],
    "sharegpt.json": [{"id": str(i), "conversations": _SHARE(*qa)} for i, qa in enumerate(QA)],
    "openai.jsonl": [{"messages": _parts(q, a)} for q, a in QA],
    "trl.jsonl": [{"prompt": _CHAT(q, a)[:1], "completion": _CHAT(q, a)[1:]} for q, a in QA],
    "table.csv": [{"prompt": q, "completion": a} for q, a in QA],
    "table.tsv": [{"instruction": q, "output": a} for q, a in QA],
    "packed.jsonl.gz": [{"messages": _CHAT(q, a)} for q, a in QA],
    "packed.csv.gz": [{"text": f"{q}\n{a}"} for q, a in QA],
    "notes.md": "\n\n".join(f"# {q}\n{a} {a}" for q, a in QA),
}


def write(folder: Path, name: str) -> Path:
    """Write one of `FILES` into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    rows = FILES[name]

    if isinstance(rows, str):
        file.write_text(rows)
        return file

    if ".csv" in name or ".tsv" in name:
        opened = gzip.open(file, "wt") if name.endswith("gz") else file.open("w", newline="")
        with opened as f:
            writer = csv.DictWriter(f, list(rows[0]), delimiter="\t" if ".tsv" in name else ",")
            writer.writeheader()
            writer.writerows(rows)
        return file

    text = json.dumps(rows) if name.endswith(".json") else _jsonl(rows)
    content = text.encode()
    if name.endswith("gz"):
        content = gzip.compress(content)
    file.write_bytes(content)
    return file
