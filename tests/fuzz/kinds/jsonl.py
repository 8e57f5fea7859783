"""Rows of data, in every format."""

import json

from mlx_packs.bases.tokenizer import load_tokenizer
from mlx_packs.config.schema import DataConfig, TrainConfig
from mlx_packs.data.encoding import encode
from mlx_packs.data.rows import load_rows
from mlx_packs.tasks.tokens import encoding_options
from tests.fuzz.kind import SUBJECT, Kind, command, library
from tests.fuzz.subjects import ORDINARY, write_base
from tests.helpers.rows import CHATS, write_rows

CALLED = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TURNS = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": None, "tool_calls": [CALLED]},
    {"role": "tool", "content": "1", "tool_call_id": "c1"},
    {"role": "assistant", "content": "yes"},
]
SHARED = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
ROWS = {
    "chat": CHATS,
    "tools": [{"messages": TURNS, "tools": [TOOL]}] * 4,
    "completion": [{"prompt": "a", "completion": "b c"}] * 4,
    "text": [{"text": "a text of some words"}] * 4,
    "alpaca": [{"instruction": "a", "input": "b", "output": "c"}] * 4,
    "sharegpt": [{"conversations": SHARED}] * 4,
}


class JsonlKind(Kind):
    """A data folder."""

    name = "jsonl"
    words = "messages role content text prompt completion tools tool_calls user system".split()
    words += "instruction input output history conversations from value".split()
    data = f"{SUBJECT}/chat"

    def make(self, folder):
        base = write_base(folder.with_name("base"))
        for name, rows in ROWS.items():
            write_rows(folder / name, train=rows, valid=rows[:2])
        self.tokenizer = load_tokenizer(base, {"eos_token_id": ORDINARY + 2}, False)

    def mutate(self, case):
        rng = case.rng
        format_name = rng.choice(list(ROWS))
        self.data = f"{SUBJECT}/{format_name}"
        file = f"{format_name}/{rng.choices(('train', 'valid'), (4, 1))[0]}.jsonl"

        if rng.random() < 0.02:
            return case.replace(file)
        if rng.random() < 0.2:
            return case.edit(file)

        lines = case.files[file].splitlines()
        for _ in range(rng.choice((1, 1, 3))):
            at = rng.randrange(len(lines))
            lines[at] = case.mutator.json(json.dumps(ROWS[format_name][at]).encode())
        return case.write(file, rng.choice((b"\n", b"\n", b"\r\n", b"\n\n")).join(lines))

    def _encode(self) -> None:
        columns = DataConfig(data=self.data)
        splits = load_rows(columns)
        options = encoding_options(
            TrainConfig(max_seq_length=64), "train", splits.format, ORDINARY + 7
        )
        for split in splits.present():
            encode(splits.rows[split], self.tokenizer, columns, options)

    def cheap(self):
        return [library(self._encode, f"encode {self.data}")]

    def whole(self):
        model = ("--model", "base", "--data", self.data, "--max-seq-length", "64")
        short = "--iters 1 --batch-size 1 --rank 1 --num-layers 1 --matmul-path dense -q"
        return [
            command("train", *model, "--show-mask"),
            command("train", *model, "--show-mask", "--json"),
            command("data", self.data, "--model", "base", "--out", "out/s"),
            command("train", *model, *short.split(), "--out", "out/p"),
        ]
