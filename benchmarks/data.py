"""Large JSONL files: memory beside the model, and seconds to the first step, first and second start.

Rows are made from the passages: whole chats until the file has its size, or so many sentences. Each
start is in a process of its own, the second with the tokens that the first has cached.

    python -m benchmarks data --gb 1 --rows 1000000
"""

import argparse
import itertools
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from mlx_packs import LoRAConfig, TrainConfig, train_pack
from mlx_packs.errors import PackError
from mlx_packs.files import CACHE_VARIABLE
from mlx_packs.training.loop import Loop

from . import alone, history, report
from .history import Environment, Record, record
from .workloads import PASSAGES

_FEW_ROWS = 400
_BATCHES = 20  # trained


def chats() -> Iterator[dict]:
    """Yield the chats of the passages in a random order, without end, no two alike."""
    lines = (PASSAGES / "train.jsonl").read_text(encoding="utf-8").splitlines()
    chosen, choice = [json.loads(line)["messages"] for line in lines], random.Random(0)
    for number in iter(lambda: choice.getrandbits(40), None):
        question, *rest = choice.choice(chosen)
        question = {**question, "content": f"{number}: {question['content']}"}
        yield {"messages": [question, *rest]}


def sentences() -> Iterator[dict]:
    """Yield sentences of the passages, without end, no two alike."""
    for number, row in enumerate(chats()):
        for message in row["messages"]:
            for i, sentence in enumerate(message["content"].split(". ")):
                if len(sentence) > 20:
                    yield {"text": f"{number}.{i} {sentence}."}


def write(file: Path, nbytes: int | None = None, rows: int | None = None) -> None:
    """Write chats of ``nbytes``, or so many sentences."""
    written = 0
    with file.open("w", encoding="utf-8") as f:
        for count, row in enumerate(chats() if rows is None else sentences()):
            if count == rows or (nbytes is not None and written >= nbytes):
                return
            written += f.write(json.dumps(row, ensure_ascii=False) + "\n")


def measure(data: str) -> dict:
    """Seconds to the first step of a run, and the most resident bytes; for a process of its own."""
    start, first = time.perf_counter(), []
    loop = Loop.train

    def train(self: Loop, batches: Iterator) -> None:
        first.append(time.perf_counter() - start)
        loop(self, batches)

    Loop.train = train
    try:
        settings = {"iters": _BATCHES, "max_seq_length": 256, "test_batches": 4, "val_batches": 0}
        with tempfile.TemporaryDirectory() as folder:
            train_pack(
                "tiny",
                data,
                LoRAConfig(rank=4, num_layers=1),
                TrainConfig(**settings, matmul_path="dense", cache_frozen="off"),
                Path(folder) / "pack",
            )
    finally:
        Loop.train = loop
    return {"s": first[0], "process": alone.peak_rss_bytes()}


def records(file: Path, name: str) -> list[Record]:
    """Both starts on a file. Raises: alone.Failed."""
    here, size = Environment.here(), file.stat().st_size
    few = file.with_name("few.jsonl")  # rows of the same lengths: what the model takes alone
    with file.open(encoding="utf-8") as f:
        few.write_text("".join(itertools.islice(f, _FEW_ROWS)), encoding="utf-8")
        rows = _FEW_ROWS + sum(1 for _ in f)
    model = alone.run("data", ["--alone", str(few)])["process"]
    load = os.getloadavg()[0]
    note = f"load average {load:.1f}"
    shape = f"{rows:,} rows, {size / 1e6:,.0f} MB"
    new_records = []
    for start in ("first start", "second start"):
        run = alone.run("data", ["--alone", str(file)])
        beside = run["process"] - model
        for metric, unit, value in (
            ("to the first step", "s", run["s"]),
            ("beside the model", "MB", beside / 1e6),
            ("times the file", "x", beside / size),
        ):
            new_records.append(
                record(here, f"data {name}", start, shape, metric, unit, [value], note=note)
            )
    return new_records


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.data", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--gb", type=float, help="chats of so many GB of 10^9 bytes")
    parser.add_argument("--rows", type=int, help="so many sentences")
    parser.add_argument("--alone", metavar="DATA", help=argparse.SUPPRESS)
    history.add_option(parser)
    options = parser.parse_args(arguments)
    if options.alone:
        print(json.dumps(measure(options.alone)))
        return 0
    new_records = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            os.environ[CACHE_VARIABLE] = str(Path(folder) / "cache")
            file = Path(folder) / "train.jsonl"
            if options.gb:
                write(file, nbytes=int(options.gb * 1e9))
                new_records += records(file, "chats")
            if options.rows:
                write(file, rows=options.rows)
                new_records += records(file, "sentences")
    except (PackError, alone.Failed) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    history.append(new_records, options.history)
    print(report.render(new_records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
