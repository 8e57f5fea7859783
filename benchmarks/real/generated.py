"""Generated answers by Qwen2.5-Coder-0.5B: asked, asked with examples, and trained.

``requests`` are turned into JSON (examples/requests), ``commands`` are written from their descriptions
(tldr pages). A bag of words can do neither: the baseline answers as in the nearest training example.

    python -m benchmarks.real.generated --work DIR [--task commands] [--seeds 0 1 2]
"""

import argparse
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mlx_packs import LoRAConfig, TrainConfig, load_base, train_pack
from mlx_packs.evaluation.metrics import same_json
from mlx_packs.packs.base import Base

from .. import history
from ..history import Environment, Record, record
from . import files
from .jobs import read_rows

REQUESTS = Path(__file__).parents[2] / "examples" / "requests"
SHOTS = 8
Pairs = Sequence[tuple[str, str]]  # questions and answers


@dataclass(frozen=True)
class Task:
    """Questions with generated answers; ``instruction`` tells a base model what to do."""

    read: Callable[[str], Pairs]  # the pairs of a split
    instruction: Callable[[Pairs], str]  # given the pairs of training
    is_right: Callable[[str, str], bool]
    config: TrainConfig


def commands(split: str) -> Pairs:
    """Return the descriptions and commands of a split."""
    rows = (row["messages"] for row in read_rows("tldr", split))
    return [(question["content"], answer["content"]) for question, answer in rows]


def requests(split: str) -> Pairs:
    """Return the requests of a split and their JSON objects."""
    lines = (REQUESTS / f"{split}.jsonl").read_text("utf-8").splitlines()
    return [(row["prompt"], row["completion"]) for row in map(json.loads, lines)]


def is_same_object(answer: str, wanted: str) -> bool:
    """Return whether an answer is the wanted object; a base model may put it into a code block."""
    return same_json(answer.strip().removeprefix("```json").strip("`\n "), wanted)


def slots(train: Pairs) -> str:
    """Return an instruction that names all intents and their slots."""
    of_intents: dict[str, set[str]] = defaultdict(set)
    for _, answer in train:
        intent, *names = json.loads(answer).items()
        of_intents[intent[1]] |= {name for name, _ in names}

    lines = [
        f"{intent}: {', '.join(sorted(names))}" for intent, names in sorted(of_intents.items())
    ]
    return (
        'Answer with one JSON object on one line and nothing else: "intent", and each slot that the '
        "request names, with its words. The intents and their slots are:\n" + "\n".join(lines)
    )


_CONFIG = TrainConfig(
    iters=40, batch_size=8, learning_rate=5e-4, metric="none", val_batches=0, test_batches=1
)
TASKS = {
    "requests": Task(requests, slots, is_same_object, replace(_CONFIG, iters=75)),
    "commands": Task(
        commands,
        lambda _: "Answer with the shell command, and nothing else.",
        lambda answer, wanted: answer.strip() == wanted,
        _CONFIG,
    ),
}


def turns(instruction: str, question: str, shown: Pairs = ()) -> list[dict]:
    """Return the messages that ask a base model, after examples that are shown."""
    messages = [{"role": "system", "content": instruction}]
    for asked, answer in shown:
        messages.append({"role": "user", "content": asked})
        messages.append({"role": "assistant", "content": answer})
    return [*messages, {"role": "user", "content": question}]


def nearest(train: Pairs, questions: Sequence[str]) -> list[str]:
    """Return the answer of the training example whose words are most alike, for each question."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    words = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
    rows = words.fit_transform(question for question, _ in train)
    likest = (words.transform(questions) @ rows.T).argmax(axis=1)
    return [train[int(i)][1] for i in np.asarray(likest).ravel()]


def trained(base: Base, train: Pairs, config: TrainConfig, out: Path) -> tuple[Path, float]:
    """Train a pack on examples drawn by its seed; its folder, and the minutes that it took."""
    order = np.random.default_rng(config.seed).permutation(len(train))
    drawn = [train[i] for i in order[: config.iters * config.batch_size]]
    rows = [{"prompt": question, "completion": answer} for question, answer in drawn]
    start = time.perf_counter()
    run = train_pack(base, rows, LoRAConfig(rank=16), config, out, overwrite=True)
    return run.pack.path, (time.perf_counter() - start) / 60


def measure(work: Path, task: Task, count: int, seeds: Sequence[int]) -> dict[str, dict]:
    """Return the right answers of each way, as a list for each seed, and minutes of training."""
    base = load_base(files.qwen())
    train, test = task.read("train"), task.read("test")[:count]
    questions = [question for question, _ in test]
    instruction = task.instruction(train)

    def right(answers: Sequence[str]) -> list[float]:
        pairs = zip(answers, test, strict=True)
        return [float(task.is_right(answer, wanted)) for answer, (_, wanted) in pairs]

    def answers(prompts: list[list[dict]], pack: Path | None = None) -> list[float]:
        return right(base.generate_batch(prompts, pack, max_tokens=96, batch_size=25))

    ways: dict[str, dict] = {
        "nearest example, TF-IDF": {"right": [right(nearest(train, questions))]},
        "asked": {"right": [answers([turns(instruction, q) for q in questions])]},
        f"asked, {SHOTS} examples": {
            "right": [answers([turns(instruction, q, train[:SHOTS]) for q in questions])]
        },
    }
    after: dict[str, list] = {"right": [], "minutes": []}
    for seed in seeds:
        config = replace(task.config, seed=seed)
        pack, minutes = trained(base, train, config, work / f"pack-{seed}")
        after["right"].append(answers([[{"role": "user", "content": q}] for q in questions], pack))
        after["minutes"].append(minutes)
        (work / "generated.json").write_text(json.dumps({**ways, "trained": after}))
    return {**ways, "trained": after}


def rows(results: dict[str, dict], here: Environment, task: str, shape: str) -> list[Record]:
    """Print a line for each way; return records."""
    records = []
    for way, result in results.items():
        shares = [100 * sum(each) / len(each) for each in result["right"]]
        mean, count = np.mean(shares), len(result["right"][0])
        error = math.sqrt(mean * (100 - mean) / count)
        by_seed = ", ".join(f"{share:.1f}" for share in shares)
        minutes = f", {np.median(result['minutes']):.1f} min" if "minutes" in result else ""
        print(f"{way:<24} {mean:5.1f} ± {error:.1f} % ({by_seed}){minutes}")
        records.append(record(here, task, way, shape, "right answers", "%", shares))
    return records


def main(arguments: list[str] | None = None) -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, metavar="DIR")
    parser.add_argument("--task", choices=TASKS, default="requests", help="[requests]")
    parser.add_argument("--rows", type=int, default=100, metavar="N", help="test examples [100]")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="N")
    parser.add_argument("--iters", type=int, metavar="N", help="batches of 8 [the task's]")
    history.add_option(parser)
    options = parser.parse_args(arguments)
    options.work.mkdir(parents=True, exist_ok=True)

    task = TASKS[options.task]
    if options.iters:
        task = replace(task, config=replace(task.config, iters=options.iters))
    results = measure(options.work, task, options.rows, options.seeds)
    shape = f"{task.config.iters} x {task.config.batch_size}, {options.rows} test rows, rank 16"
    name = "real shell-commands" if options.task == "commands" else f"real {options.task}"
    history.append(rows(results, Environment.here(), name, shape), options.history)


if __name__ == "__main__":
    main()
