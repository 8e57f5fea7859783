"""Millions of tokens from JSONL shards, with kills: tokenizing and batches go on, no row is lost or twice.

Shards are made from the passages. They are tokenized by a process that is killed in the middle and
started again; then an epoch of the batches that training takes is written to a log, once by one
process, and once by processes that are killed, each of which begins at the batch after the last one
of the log. Both logs must be equal, and have every row once.

    python -m benchmarks stream --tokens 10e6 --shards 8 --num-proc 2
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from mlx_packs.config.schema import DataConfig
from mlx_packs.data.batches import training_set
from mlx_packs.data.dataset import prefetched
from mlx_packs.data.encoding import EncodingOptions
from mlx_packs.data.rows import load_rows
from mlx_packs.data.sampler import Sampler
from mlx_packs.data.token_cache import SUFFIX, encode_cached
from mlx_packs.files import CACHE_VARIABLE
from mlx_packs.packs.base import load_base

from . import alone
from .data import chats, sentences

_LENGTH, _BATCH_SIZE = 512, 8
_TOKEN_BYTES = {"texts": 2.8, "chats": 3.15}  # of a file for each token of the tiny base
_CHECKOUT = Path(__file__).parent.parent


class Failed(Exception):
    """A pass differs, or a process has failed."""


def write_shards(folder: Path, tokens: float, shards: int, kind: str = "texts") -> None:
    """Write about so many tokens of texts or chats as numbered shards of a training split."""
    folder.mkdir(parents=True, exist_ok=True)
    rows: Iterator[dict] = sentences() if kind == "texts" else chats()
    for number in range(shards):
        room = tokens * _TOKEN_BYTES[kind] / shards
        with (folder / f"train-{number:05d}-of-{shards:05d}.jsonl").open("w") as file:
            while room > 0:
                room -= file.write(json.dumps(next(rows), ensure_ascii=False) + "\n")


def stream(folder: str, log: Path | None, num_proc: int) -> dict:
    """Tokenize the shards; write the batches of an epoch to a log, after those that it has.

    A line has the places of the examples of a batch, and the sum of its tokens.
    """
    tokenizer, start = load_base("tiny").tokenizer, time.perf_counter()
    before = alone.rss_bytes()
    columns = DataConfig(data=folder, hold_out="last")
    rows = load_rows(columns).rows["train"]
    options = EncodingOptions(max_seq_length=_LENGTH)
    examples, _ = encode_cached(rows, tokenizer, columns, options, num_proc=num_proc)
    seconds, tokens = time.perf_counter() - start, int(examples.lengths.sum())
    sampler = Sampler(examples.lengths, _BATCH_SIZE, _LENGTH - 1, seed=1)
    batches = len(sampler.epoch(0))
    if log is not None:
        whole, _, rest = log.read_bytes().rpartition(b"\n") if log.exists() else (b"", b"", b"")
        done = whole.count(b"\n") + bool(whole)  # the cursor
        with log.open("ab") as file, closing(_from(examples, sampler, done)) as source:
            file.truncate(file.tell() - len(rest))  # of a line that was cut by the kill
            for _ in range(done, batches):
                batch = next(source)
                places = [Path(examples.items[i].where).name for i in batch.examples]
                line = {"rows": places, "sum": int(batch.inputs["tokens"].sum())}
                file.write(json.dumps(line).encode() + b"\n")
                file.flush()
    return {
        "rows": len(rows),
        "tokens": tokens,
        "batches": batches,
        "tokenizing_s": seconds,
        "process_cpu_s": sum(os.times()[:4]),
        "rss_before_mb": before / 1e6,
        "peak_rss_mb": alone.peak_rss_bytes() / 1e6,
    }


def _from(examples, sampler, start: int) -> Iterator:
    return prefetched(training_set(examples, sampler).batches(start))


def _start(folder: Path, log: Path | None, num_proc: int) -> subprocess.Popen:
    command = [sys.executable, "-m", "benchmarks.stream", "--alone", str(folder)]
    options = ["--num-proc", str(num_proc), *(["--log", str(log)] if log else [])]
    return subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True, cwd=_CHECKOUT)


def _result(process: subprocess.Popen) -> dict:
    text, _ = process.communicate()
    if process.returncode:
        raise Failed(f"a process ended with {process.returncode}")
    return json.loads(text.splitlines()[-1])


def _kill_when(process: subprocess.Popen, is_time) -> None:
    """Kill a process once ``is_time()``; it must not have ended before."""
    while not is_time():
        if process.poll() is not None:
            raise Failed("a process ended before it was to be killed; use more tokens")
        time.sleep(0.01)
    process.kill()
    process.communicate()


def check(folder: Path, shards: Path, num_proc: int, kills: int = 2) -> dict:
    """Tokenize and stream shards with kills, and compare. Raises: Failed."""
    cache, log = Path(os.environ[CACHE_VARIABLE]) / "tokens", folder / "with-kills.jsonl"
    process = _start(shards, None, num_proc)
    _kill_when(process, lambda: len(list(cache.glob(f"*{SUFFIX}"))) >= 2)
    parts = len(list(cache.glob(f"*{SUFFIX}")))
    tokenized = _result(_start(shards, None, num_proc))
    uninterrupted = folder / "uninterrupted.jsonl"
    result = _result(_start(shards, uninterrupted, num_proc))
    for kill in range(kills):
        size = uninterrupted.stat().st_size * (kill + 1) // (kills + 1)
        process = _start(shards, log, num_proc)
        _kill_when(process, lambda: log.exists() and log.stat().st_size >= size)  # noqa: B023
    _result(_start(shards, log, num_proc))
    if log.read_bytes() != uninterrupted.read_bytes():
        raise Failed("the batches after kills are not those of an uninterrupted pass")
    rows = [row for line in log.read_text().splitlines() for row in json.loads(line)["rows"]]
    split = load_rows(DataConfig(data=str(shards), hold_out="last")).rows["train"]
    if sorted(rows) != sorted(Path(split.where(i)).name for i in range(len(split))):
        raise Failed("a row is missing, or twice")
    return {
        **result,
        "parts_before_the_kill": parts,
        "tokenizing_after_it_s": tokenized["tokenizing_s"],
        "kills": kills + 1,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.stream", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--tokens", type=float, default=10e6)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--kind", choices=("texts", "chats"), default="texts")
    parser.add_argument("--num-proc", type=int, default=2, help="processes that tokenize")
    parser.add_argument("--once", action="store_true", help="tokenize once, without kills")
    parser.add_argument("--alone", metavar="DATA", help=argparse.SUPPRESS)
    parser.add_argument("--log", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.alone:
        print(json.dumps(stream(options.alone, options.log, options.num_proc)))
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ[CACHE_VARIABLE] = str(folder / "cache")
        write_shards(folder / "shards", options.tokens, options.shards, options.kind)
        try:
            if options.once:
                result = _result(_start(folder / "shards", None, options.num_proc))
            else:
                result = check(folder, folder / "shards", options.num_proc)
        except Failed as error:
            print(f"benchmarks: {error}", file=sys.stderr)
            return 2
    for key, value in result.items():
        print(
            f"{key:<24} {value:>14,.1f}" if isinstance(value, float) else f"{key:<24} {value:>14,}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
