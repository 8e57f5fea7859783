"""Embedders on pairs of one intent (banking77): 1-NN accuracy before and after training.

python -m benchmarks.real.embedders [MODEL ...]    # MiniLM and tiny; options: -h
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks import history
from benchmarks.history import Environment, record
from mlx_packs import TrainConfig, load_base, train_pack
from mlx_packs.memory.matmul_path import generation_path
from mlx_packs.packs.base import Base, activated

from .files import minilm
from .jobs import write_rows
from .minilm import (
    BATCH,
    LONGEST,
    QUERIES,
    REFERENCES,
    STEPS,
    Messages,
    lora,
    nearest_accuracy,
)

Results = Sequence[tuple[float, float, float]]  # by seed: accuracy before and after, seconds

_RATES = {"encoder": 3e-4, "decoder": 1e-3}


def accuracy(base: Base) -> float:
    """Return the 1-NN accuracy of the intents of messages of the test split."""
    references = Messages.read("train").sample(REFERENCES)
    queries = Messages.read("test").sample(QUERIES)
    vectors = base.encode(references.texts), base.encode(queries.texts)
    return nearest_accuracy(vectors[0], references.intents, vectors[1], queries.intents)


def trained(
    model: str, seed: int, options: argparse.Namespace, place: Path
) -> tuple[float, float, float]:
    """Return the accuracy before and after training on pairs of messages, and its seconds."""
    data = place / f"data-{seed}"
    pairs = Messages.read("train").pairs(options.batch_size * options.steps, seed)
    write_rows(data / "train.jsonl", pairs)
    write_rows(data / "test.jsonl", Messages.read("valid").pairs(32, 0))

    base = load_base(model)
    path = generation_path(base.model)
    with activated(base, None, path):
        before = accuracy(base)
    config = TrainConfig(
        task="embedding",
        iters=options.steps,
        batch_size=options.batch_size,
        max_seq_length=LONGEST,
        learning_rate=options.rate or _RATES[base.architecture],
        val_batches=0,
        seed=seed,
        awake=False,
    )
    began = time.monotonic()
    run = train_pack(base, str(data), lora(), config, place / f"pack-{seed}", progress=False)
    seconds = time.monotonic() - began
    with activated(base, run.pack, path):
        return before, accuracy(base), seconds


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=[str(minilm()), "tiny"])
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help=f"[{STEPS}]")
    parser.add_argument("--batch-size", type=int, default=BATCH, metavar="N", help=f"[{BATCH}]")
    parser.add_argument("--rate", type=float, metavar="RATE", help="[by architecture]")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="[3]")
    history.add_option(parser)
    options = parser.parse_args(arguments)

    for model in options.models:
        with tempfile.TemporaryDirectory() as place:
            results = [trained(model, s, options, Path(place)) for s in range(options.seeds)]
        print(line(model, results, options), flush=True)
        history.append(records(model, results, options), options.history)
    return 0


def line(model: str, results: Results, options: argparse.Namespace) -> str:
    """Return the accuracies of a model for people."""
    before, after, seconds = np.array(results).T
    error = ""
    if len(after) > 1:
        error = f" ± {after.std(ddof=1) / len(after) ** 0.5:.1%}"
    return (
        f"{Path(model).name}: 1-NN accuracy {before[0]:.1%} -> {after.mean():.1%}{error} "
        f"({options.seeds} seeds, {options.steps} steps, {seconds.mean():.0f} s)"
    )


def records(model: str, results: Results, options: argparse.Namespace) -> list[history.Record]:
    """Return a record of the accuracy before and after; a sample is a seed."""
    here = Environment.here()
    shape = f"{options.batch_size} pairs x {options.steps}, {QUERIES} queries"
    before, after, _ = np.array(results).T
    named = {"before": before[:1], "after": after}
    return [
        record(
            here, f"embedder {Path(model).name}", when, shape, "1-NN accuracy", "%", 100 * values
        )
        for when, values in named.items()
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
