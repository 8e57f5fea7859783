"""Rows that are converted when they are read: tables, packed files, texts."""

import gzip
import json

from mlx_packs.bases.tokenizer import load_tokenizer
from tests.fuzz.kind import SUBJECT, command
from tests.fuzz.kinds.jsonl import JsonlKind
from tests.fuzz.subjects import ORDINARY, write_base

TABLE = 'prompt,completion\na,"b ""c"" d"\n"e, f","g\nh"\ni,j\n'
LINES = 'prompt\tcompletion\na\t"b ""c"" d"\n"e, f"\t"g\ni\tj\n'
FILES = {
    "train.csv": TABLE.encode(),
    "train.tsv": LINES.encode(),
    "train.csv.gz": TABLE.encode(),
    "train.jsonl.gz": (json.dumps({"text": "some words"}) + "\n").encode() * 4,
    "notes.md": b"# A title\n\nA paragraph.\n\n" + b"words " * 1000 + b"\n\nan end",
}


class TableKind(JsonlKind):
    """A file in a folder of its own."""

    name = "tables"
    words = ("prompt", "completion", "text", '"', ",", "\t", "\r\n")
    data = f"{SUBJECT}/train.csv/train.csv"

    def make(self, folder):
        base = write_base(folder.with_name("base"))
        for name, content in FILES.items():
            file = folder / name / name
            file.parent.mkdir(parents=True)
            file.write_bytes(gzip.compress(content, mtime=0) if name.endswith("gz") else content)
        self.tokenizer = load_tokenizer(base, {"eos_token_id": ORDINARY + 2}, False)

    def mutate(self, case):
        rng = case.rng
        name = rng.choice(list(FILES))
        path = f"{name}/{name}"
        self.data = f"{SUBJECT}/{name if rng.random() < 0.3 else path}"
        if rng.random() < 0.02:
            return case.replace(path)
        if not name.endswith("gz") or rng.random() < 0.3:
            return case.edit(path)
        inner = case.mutator.bytes(FILES[name])
        return case.write(path, gzip.compress(inner, mtime=0))

    def whole(self):
        model = ("--model", "base", "--data", self.data, "--max-seq-length", "64")
        return [
            command("train", *model, "--show-mask"),
            command("data", self.data, "--model", "base"),
        ]
