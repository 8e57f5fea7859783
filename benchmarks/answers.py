"""Greedy answers to many prompts, beside mlx-lm's `batch_generate` in the same process, alternating.

mlx-lm has the weights as float32, which a CPU computes fastest.

python -m benchmarks answers --model Qwen2.5-Coder.gguf --rows 300
"""

import argparse
import gzip
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import mlx_lm

from mlx_packs.errors import PackError
from mlx_packs.inference.generate import chat_prompt
from mlx_packs.packs.base import load_base
from mlx_packs.runtime import mx

from . import history, report
from .history import Environment, Record, percentiles, record
from .implementations import SAME_BLAS
from .real import files, jobs

OURS = "mlx_packs"


def questions(rows: int) -> list[list[dict]]:
    """Return the chats of tldr's held-out pages, without their answers. Raises: files.Missing."""
    with gzip.open(files.data("tldr") / "test.jsonl.gz", "rt") as file:
        chats = [json.loads(line)["messages"] for line, _ in zip(file, range(rows), strict=False)]
    return [[message for message in chat if message["role"] != "assistant"] for chat in chats]


def run(options: argparse.Namespace) -> list[Record]:
    """Answer by each implementation, alternating. Raises: files.Missing, PackError."""
    chats = questions(options.rows)
    base = load_base(options.model)
    with tempfile.TemporaryDirectory() as folder:
        jobs.write_dense(Path(options.model), Path(folder) / "dense")
        peer, tokenizer = mlx_lm.load(str(Path(folder) / "dense"))
        mx.eval(peer.parameters())
    prompts = [chat_prompt(base, chat) for chat in chats]
    most = options.tokens

    def ours(batch_size: int | None) -> Callable[[], list[str]]:
        return lambda: base.generate_batch(chats, max_tokens=most, batch_size=batch_size)

    def of_peer() -> list[str]:
        return mlx_lm.batch_generate(peer, tokenizer, prompts, max_tokens=most).texts

    implementations = {OURS: ours(None), f"{OURS}, 8 together": ours(8), SAME_BLAS: of_peer}
    seconds: dict[str, list[float]] = {name: [] for name in implementations}
    texts: dict[str, list[str]] = {}
    for turn in range(options.rounds):
        for name in list(implementations)[:: 1 if turn % 2 == 0 else -1]:
            print(f"round {turn + 1}: {name}", file=sys.stderr)
            start = time.perf_counter()
            texts[name] = implementations[name]()
            seconds[name].append(time.perf_counter() - start)
            mx.clear_cache()
    return _records(seconds, texts, options)


def _records(
    seconds: dict[str, list[float]], texts: dict[str, list[str]], options: argparse.Namespace
) -> list[Record]:
    here = Environment.here()
    base = percentiles(seconds[SAME_BLAS])["p50"]
    task = f"answers {Path(options.model).name}"
    shape = f"{options.rows} prompts of tldr, at most {options.tokens} tokens"

    records = []
    for name, samples in seconds.items():
        pairs = zip(texts[name], texts[OURS], strict=True)
        same = sum(a.strip() == b.strip() for a, b in pairs)
        records.append(
            record(
                here,
                task,
                name,
                shape,
                "all answers",
                "s",
                samples,
                baseline=SAME_BLAS,
                ratio=base / percentiles(samples)["p50"],
                note=f"{same} answers as those of {OURS}",
            )
        )
    return records


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks answers", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--model", type=str, help="GGUF file or folder [the real Qwen]")
    parser.add_argument("--rows", type=int, default=300, help="prompts [300]")
    parser.add_argument("--tokens", type=int, default=32, help="of an answer, at most [32]")
    parser.add_argument("--rounds", type=int, default=1, help="[1]")
    history.add_option(parser)

    options = parser.parse_args(arguments)
    try:
        options.model = options.model or str(files.qwen())
        new_records = run(options)
    except (files.Missing, PackError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    history.append(new_records, options.history)
    print(report.render(new_records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
