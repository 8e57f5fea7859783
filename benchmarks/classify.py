"""Classifiers of banking77: a score head, label names, generated labels, TF-IDF, PEFT's SEQ_CLS.

python -m benchmarks classify --work DIR                     # three seeds
python -m benchmarks classify --work DIR --seeds 0 --steps 4 --rows 20 --history /dev/null

All that train get the same examples, batch size, steps and learning rate; each seed has its own
order of the examples. TF-IDF with logistic regression is fitted to all training rows, as in use,
and once to the examples of as many steps. Generated labels that are no label count as wrong, and
have no probabilities. ``train_s`` are seconds in steps, ``label_s`` those of all test examples.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlx_packs import LoRAConfig, TrainConfig, evaluate, load_base, train_pack
from mlx_packs.data.labels import SINGLE
from mlx_packs.errors import PackError
from mlx_packs.evaluation.classification import Predictions
from mlx_packs.packs.base import Base
from mlx_packs.training.result import TrainRun

from . import history
from .history import Environment, Record, record
from .real import files
from .real.jobs import ALPHA, RANK, TARGETS, WEIGHT_DECAY, read_rows, write_dense, write_rows

PREFIX = ": "  # after which a row of banking77 has the customer's message
METRICS = ("accuracy", "macro_f1", "log_loss", "calibration_error")
UNITS = {"accuracy": "%", "macro_f1": "%", "log_loss": "nats", "calibration_error": "%"}
RESULTS = "classify.jsonl"
_NEVER = -30.0  # the log-probability of a label that a baseline has not seen
LONGEST = 12  # tokens of a label, with the one that ends it


@dataclass(frozen=True)
class Task:
    """The examples of a seed, and how they are trained on.

    Attributes:
        texts: by split; ``labels`` are their numbers in ``names``.
        steps: batches; ``rate`` is the learning rate of all.
    """

    work: Path
    seed: int
    steps: int
    batch_size: int
    rate: float
    names: Sequence[str]
    texts: dict[str, list[str]]
    labels: dict[str, np.ndarray]

    @property
    def folder(self) -> Path:
        return self.work / f"seed{self.seed}"

    def rows(self, split: str) -> list[dict[str, str]]:
        """Return rows of texts with labels."""
        numbers = self.labels[split]
        return [
            {"text": text, "label": self.names[number]}
            for text, number in zip(self.texts[split], numbers, strict=True)
        ]


Result = dict[str, float]
Way = Callable[[Task], Result]


def read_task(options: argparse.Namespace, seed: int) -> Task:
    """Return banking77 as texts and labels; at most ``options.rows`` of a held-out split."""
    texts: dict[str, list[str]] = {}
    named: dict[str, list[str]] = {}
    for split in ("train", "valid", "test"):
        chats = [row["messages"] for row in read_rows("banking77", split)]
        if split != "train":
            chats = chats[: options.rows]
        texts[split] = [chat[0]["content"].partition(PREFIX)[2] for chat in chats]
        named[split] = [chat[1]["content"] for chat in chats]

    names = sorted(set(named["train"]))
    numbers = {name: number for number, name in enumerate(names)}
    labels = {split: np.array([numbers[n] for n in own]) for split, own in named.items()}
    return Task(
        options.work,
        seed,
        options.steps,
        options.batch_size,
        options.rate,
        names,
        texts,
        labels,
    )


def settings(size: Task, /, **changes: Any) -> TrainConfig:
    """Return the settings of a run of ours."""
    return TrainConfig(
        iters=size.steps,
        batch_size=size.batch_size,
        learning_rate=size.rate,
        lr_schedule="constant",
        optimizer_config={"adamw": {"bias_correction": True, "weight_decay": WEIGHT_DECAY}},
        max_grad_norm=0.0,
        max_seq_length=160,
        matmul_path="dense",
        val_batches=0,
        test_batches=1,
        save_every=size.steps,
        seed=size.seed,
        awake=False,
        **changes,
    )


def ours(task: Task) -> Result:
    """Return the metrics of ``--task classify``, calibrated on the validation split."""
    data = task.folder / "texts"
    for split in task.texts:
        write_rows(data / f"{split}.jsonl", task.rows(split))

    base = load_base(files.smollm2())
    train = settings(task, task="classify", calibrate=True)
    run = trained(task, base, data, train, "classify")

    began = time.perf_counter()
    report = evaluate(
        base, run.pack, str(data), batch_size=16, matmul_path="dense", progress=False
    ).to_json()
    seconds = {"train_s": run.report["train_s"], "label_s": time.perf_counter() - began}

    result = {name: report[name] for name in METRICS}
    return {**result, **seconds, "temperature": report["temperature"]}


def trained(task: Task, base: Base, data: Path, train: TrainConfig, name: str) -> TrainRun:
    """Return a run of ours, whose adapters are those of PEFT."""
    lora = LoRAConfig(rank=RANK, alpha=ALPHA)
    out = task.folder / name
    return train_pack(base, str(data), lora, train, out, overwrite=True, progress=False)


def generated(task: Task) -> Result:
    """Return accuracy and macro F1 of the labels that a pack of ``--task lm`` generates."""
    data = task.folder / "chats"
    for split in task.texts:
        chats = [_chat(row["text"], row["label"]) for row in task.rows(split)]
        write_rows(data / f"{split}.jsonl", chats)

    base = load_base(files.smollm2())
    run = trained(task, base, data, settings(task, metric="none"), "generate")

    began = time.perf_counter()
    with base.applied(run.pack, "dense"):
        answers = base.generate_batch(task.texts["test"], batch_size=16, max_tokens=LONGEST)
    seconds = {"train_s": run.report["train_s"], "label_s": time.perf_counter() - began}

    numbers = {name: number for number, name in enumerate(task.names)}
    none = len(task.names)  # what is no label
    predicted = np.array([numbers.get(answer.strip(), none) for answer in answers])
    certain = Predictions(np.eye(none + 1)[predicted], task.labels["test"], SINGLE).metrics()
    return {name: certain[name] for name in ("accuracy", "macro_f1")} | seconds


def _chat(text: str, label: str) -> dict[str, list[dict[str, str]]]:
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": label}]
    return {"messages": messages}


def tf_idf(task: Task, examples: int | None = None) -> Result:
    """Return the metrics of scikit-learn's TF-IDF of words and pairs with logistic regression.

    It is fitted to as many of the examples as ``examples``, which are in an order of their own for
    each seed.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    began = time.perf_counter()
    vectors = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
    pipeline = make_pipeline(vectors, LogisticRegression(C=10.0, max_iter=1000))
    chosen = shuffled(task)[:examples]
    pipeline.fit(np.array(task.texts["train"])[chosen], task.labels["train"][chosen])

    fitted = time.perf_counter()
    known = pipeline.predict_log_proba(task.texts["test"])
    seconds = {"train_s": fitted - began, "label_s": time.perf_counter() - fitted}

    logits = np.full((len(known), len(task.names)), _NEVER)
    logits[:, pipeline.classes_] = known
    return _metrics(logits, task) | seconds


def shuffled(task: Task) -> np.ndarray:
    """Return the numbers of the training examples in an order of the seed."""
    return np.random.default_rng(task.seed).permutation(len(task.texts["train"]))


def peft(task: Task) -> Result:
    """Return the metrics of transformers' classifier with PEFT's adapters, on torch's CPU."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    dense = write_dense(files.smollm2(), task.work / "dense")
    tokenizer = AutoTokenizer.from_pretrained(dense)
    torch.manual_seed(task.seed)
    model = AutoModelForSequenceClassification.from_pretrained(
        dense, num_labels=len(task.names), dtype=torch.float32
    )
    model.config.pad_token_id = tokenizer.pad_token_id
    targets = list(TARGETS)
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets, task_type="SEQ_CLS")
    model = get_peft_model(model, config)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=task.rate, weight_decay=WEIGHT_DECAY)

    def batch(texts: Sequence[str]) -> Any:
        return tokenizer(list(texts), return_tensors="pt", padding=True)

    model.train()
    texts = np.array(task.texts["train"])
    order = shuffled(task)

    began = time.perf_counter()
    for step in range(task.steps):
        start = step * task.batch_size
        chosen = np.take(order, np.arange(start, start + task.batch_size), mode="wrap")
        labels = torch.tensor(task.labels["train"][chosen])
        optimizer.zero_grad()
        model(**batch(texts[chosen]), labels=labels).loss.backward()
        optimizer.step()

    ended = time.perf_counter()
    model.eval()
    with torch.no_grad():
        parts = [
            model(**batch(task.texts["test"][i : i + 16])).logits.numpy()
            for i in range(0, len(task.texts["test"]), 16)
        ]
    seconds = {"train_s": ended - began, "label_s": time.perf_counter() - ended}
    return _metrics(np.concatenate(parts), task) | seconds


def _metrics(logits: np.ndarray, task: Task) -> Result:
    metrics = Predictions(logits.astype(np.float64), task.labels["test"], SINGLE).metrics()
    return {name: metrics[name] for name in METRICS}


WAYS: dict[str, Way] = {
    "classify": ours,
    "generated label": generated,
    "TF-IDF + logistic regression": tf_idf,
    "TF-IDF, same examples": lambda task: tf_idf(task, task.steps * task.batch_size),
    "PEFT SEQ_CLS": peft,
}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    p = argparse.ArgumentParser("python -m benchmarks classify", description=__doc__.split("\n")[0])
    p.add_argument("--work", type=Path, required=True, metavar="DIR", help="folder for runs")
    p.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="N", help="[0 1 2]")
    p.add_argument("--only", action="append", choices=WAYS, metavar="NAME", help="%(choices)s")
    p.add_argument("--batch-size", type=int, default=16, metavar="N", help="examples [16]")
    p.add_argument("--steps", type=int, default=600, metavar="N", help="batches [600]")
    p.add_argument("--rate", type=float, default=5e-4, metavar="RATE", help="[5e-4]")
    p.add_argument(
        "--rows", type=int, default=500, metavar="N", help="held-out examples at most [500]"
    )
    history.add_option(p)
    return p


def main(arguments: list[str] | None = None) -> int:
    """Train and compare; 2 after an error that the user can correct."""
    options = parser().parse_args(arguments)
    options.work = options.work.expanduser().resolve()
    chosen = options.only or list(WAYS)
    results: dict[str, list[Result]] = {name: [] for name in chosen}
    try:
        options.work.mkdir(parents=True, exist_ok=True)
        for seed in options.seeds:
            task = read_task(options, seed)
            for name in chosen:
                result = WAYS[name](task)
                results[name].append(result)
                line = {"seed": seed, "way": name, **result}
                print(json.dumps(line), file=sys.stderr)
                with (options.work / RESULTS).open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
    except (files.Missing, PackError, ImportError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2

    print("\n".join(table(results)))
    history.append(records(results, options), options.history)
    return 0


def table(results: dict[str, list[Result]]) -> list[str]:
    """Return a table of the means over seeds, with their standard deviation."""
    columns = (*METRICS, "train_s", "label_s")
    lines = ["| way | " + " | ".join(columns) + " |", "|---|" + "---:|" * len(columns)]
    for name, own in results.items():
        cells = []
        for column in columns:
            values = [result[column] for result in own if column in result]
            cells.append(_spread(values))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "–"
    text = f"{statistics.mean(values):.4g}"
    if len(values) > 1:
        text += f" ± {statistics.stdev(values):.2g}"
    return text


def records(results: dict[str, list[Result]], options: argparse.Namespace) -> list[Record]:
    """Return a record of each metric and time; a sample is a seed."""
    here = Environment.here()
    shape = f"{options.batch_size}x{options.steps}, {options.rows} rows"
    lines = []
    for name, own in results.items():
        for metric in (*METRICS, "train_s", "label_s"):
            factor = 100.0 if UNITS.get(metric) == "%" else 1.0
            values = [factor * result[metric] for result in own if metric in result]
            unit = UNITS.get(metric, "s")
            if values:
                of = metric.removesuffix("_s").replace("_", " ")
                lines.append(record(here, "classify banking77", name, shape, of, unit, values))
    return lines
