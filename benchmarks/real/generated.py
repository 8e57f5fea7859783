"""Shell commands from their descriptions (tldr pages), by Qwen2.5-Coder-0.5B: asked, shown, trained.

A bag of words cannot write a command: the nearest page in training, by TF-IDF, is the baseline.

    python -m benchmarks.real.shell_commands --work DIR [--rows 100] [--seeds 0 1 2]
"""

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from mlx_packs import LoRAConfig, TrainConfig, load_base, train_pack
from mlx_packs.packs.base import Base

from .. import history
from ..history import Environment, Record, record
from . import files
from .jobs import read_rows

INSTRUCTION = "Answer with the shell command, and nothing else."
SHOTS = 8
TRAIN = TrainConfig(
    iters=40, batch_size=8, learning_rate=5e-4, metric="none", val_batches=0, test_batches=1
)
Pairs = Sequence[tuple[str, str]]  # descriptions and commands


def pairs(split: str) -> list[tuple[str, str]]:
    """Return the descriptions and commands of a split."""
    rows = (row["messages"] for row in read_rows("tldr", split))
    return [(question["content"], answer["content"]) for question, answer in rows]


def turns(question: str, shown: Pairs = ()) -> list[dict]:
    """Return the messages that ask for a command, after examples that are shown."""
    messages = [{"role": "system", "content": INSTRUCTION}]
    for asked, answer in shown:
        messages.append({"role": "user", "content": asked})
        messages.append({"role": "assistant", "content": answer})
    return [*messages, {"role": "user", "content": question}]


def nearest(train: Pairs, questions: Sequence[str]) -> list[str]:
    """Return the command of the training page whose words are most alike, for each question."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    words = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
    pages = words.fit_transform(question for question, _ in train)
    likest = (words.transform(questions) @ pages.T).argmax(axis=1)
    return [train[int(i)][1] for i in np.asarray(likest).ravel()]


def right(answers: Sequence[str], test: Pairs) -> list[float]:
    """Return 1 for each answer that is the expected one, and 0 for others."""
    return [
        float(answer.strip() == wanted) for answer, (_, wanted) in zip(answers, test, strict=True)
    ]


def trained(base: Base, train: Pairs, config: TrainConfig, out: Path) -> tuple[Path, float]:
    """Train a pack on pages drawn by its seed; its folder, and the minutes that it took."""
    order = np.random.default_rng(config.seed).permutation(len(train))
    pages = [train[i] for i in order[: config.iters * config.batch_size]]
    rows = [{"prompt": question, "completion": answer} for question, answer in pages]
    start = time.perf_counter()
    run = train_pack(base, rows, LoRAConfig(rank=16), config, out, overwrite=True)
    return run.pack.path, (time.perf_counter() - start) / 60


def measure(work: Path, count: int, seeds: Sequence[int], config: TrainConfig) -> dict[str, dict]:
    """Return the right answers of each way, as a list for each seed, and minutes of training."""
    base = load_base(files.qwen())
    train, test = pairs("train"), pairs("test")[:count]
    questions = [question for question, _ in test]

    def answers(prompts: list[list[dict]], pack: Path | None = None) -> list[float]:
        texts = base.generate_batch(prompts, pack, max_tokens=64, batch_size=32)
        return right(texts, test)

    ways: dict[str, dict] = {
        "nearest page, TF-IDF": {"right": [right(nearest(train, questions), test)]},
        "asked": {"right": [answers([turns(q) for q in questions])]},
        f"asked, {SHOTS} examples": {
            "right": [answers([turns(q, train[:SHOTS]) for q in questions])]
        },
    }
    after: dict[str, list] = {"right": [], "minutes": []}
    for seed in seeds:
        pack, minutes = trained(base, train, replace(config, seed=seed), work / f"commands-{seed}")
        after["right"].append(answers([[{"role": "user", "content": q}] for q in questions], pack))
        after["minutes"].append(minutes)
        (work / "shell_commands.json").write_text(json.dumps({**ways, "trained": after}))
    return {**ways, "trained": after}


def rows(results: dict[str, dict], here: Environment, shape: str) -> list[Record]:
    """Print a line for each way; return records."""
    records = []
    for way, result in results.items():
        shares = [100 * sum(each) / len(each) for each in result["right"]]
        mean, count = np.mean(shares), len(result["right"][0])
        error = math.sqrt(mean * (100 - mean) / count)
        minutes = f", {np.median(result['minutes']):.1f} min" if "minutes" in result else ""
        print(f"{way:<24} {mean:5.1f} ± {error:.1f} %{minutes}")
        records.append(
            record(here, "real shell-commands", way, shape, "exact answers", "%", shares)
        )
    return records


def main(arguments: list[str] | None = None) -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, metavar="DIR")
    parser.add_argument("--rows", type=int, default=100, metavar="N", help="unseen pages [100]")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="N")
    history.add_option(parser)
    parser.add_argument("--iters", type=int, default=TRAIN.iters, metavar="N", help="batches [40]")
    options = parser.parse_args(arguments)
    options.work.mkdir(parents=True, exist_ok=True)

    here = Environment.here()
    config = replace(TRAIN, iters=options.iters)
    results = measure(options.work, options.rows, options.seeds, config)
    shape = f"{config.iters} x {config.batch_size}, {options.rows} unseen pages, rank 16"
    history.append(rows(results, here, shape), options.history)


if __name__ == "__main__":
    main()
