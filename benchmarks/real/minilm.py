"""MiniLM on pairs of one intent, ours beside sentence-transformers: 1-NN accuracy of intents.

python -m benchmarks.real.minilm NAME FOLDER    # started by `python -m benchmarks real`
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlx_packs import LoRAConfig, TrainConfig, load_base
from mlx_packs.adapters.attach import attach
from mlx_packs.data.pairs import PairSampler, encode_pairs
from mlx_packs.data.rows import read_rows as rows_of_file
from mlx_packs.files import to_json
from mlx_packs.runtime import mx

from .jobs import ALPHA, RANK, WEIGHT_DECAY, read_rows, write_rows
from .turns import Turns

OURS, SENTENCE_TRANSFORMERS = "mlx_packs", "sentence-transformers"
RATE, SCALE, LONGEST = 3e-4, 20.0, 64
BATCH, STEPS, REFERENCES, QUERIES = 32, 60, 2000, 1000
_PROMPT = "Intent of this message to a bank: "


@dataclass(frozen=True)
class Messages:
    """Messages of customers and their intents."""

    texts: list[str]
    intents: np.ndarray  # of str

    @classmethod
    def read(cls, split: str) -> "Messages":
        """Read a split of banking77."""
        chats = [row["messages"] for row in read_rows("banking77", split)]
        texts = [chat[0]["content"].removeprefix(_PROMPT) for chat in chats]
        return cls(texts, np.array([chat[1]["content"] for chat in chats]))

    def sample(self, count: int, seed: int = 0) -> "Messages":
        """Return some of them, the same ones for a seed."""
        chosen = np.random.default_rng(seed).permutation(len(self.texts))[:count]
        return Messages([self.texts[i] for i in chosen], self.intents[chosen])

    def pairs(self, count: int, seed: int) -> list[dict[str, str]]:
        """Return pairs of two messages of one intent; no message is in two of them."""
        random = np.random.default_rng(seed)
        pairs = []
        for intent in np.unique(self.intents):
            chosen = random.permutation(np.flatnonzero(self.intents == intent))
            for one, other in zip(chosen[::2], chosen[1::2], strict=False):
                pairs.append({"anchor": self.texts[one], "positive": self.texts[other]})
        return [pairs[i] for i in random.permutation(len(pairs))[:count]]


def nearest_accuracy(
    references: np.ndarray, intents: np.ndarray, queries: np.ndarray, expected: np.ndarray
) -> float:
    """Return how often the nearest reference by cosine has the intent of the query.

    Args:
        references: vectors [N, D].
        intents: of the references, [N].
        queries: vectors [M, D].
        expected: intents of the queries, [M].
    """
    references = references / np.linalg.norm(references, axis=1, keepdims=True)
    nearest = (queries @ references.T).argmax(axis=1)  # the length of a query changes no order
    return float((intents[nearest] == expected).mean())


@dataclass(frozen=True)
class PairJob:
    """One seed, as both trainers read it from ``job.json``."""

    seed: int
    batch_size: int
    steps: int
    turn: int
    references: int
    queries: int
    model: str
    folder: str

    @property
    def data(self) -> Path:
        """The folder of the pairs."""
        return Path(self.folder) / "data"

    @property
    def start(self) -> Path:
        """The first adapters, in mlx-lm's names."""
        return Path(self.folder) / "start.safetensors"

    @property
    def batches(self) -> list[list[dict[str, str]]]:
        """The pairs of each batch, in the order of our sampler."""
        return json.loads((Path(self.folder) / "batches.json").read_text())

    @classmethod
    def read(cls, folder: str) -> "PairJob":
        """Read the job of a folder."""
        return cls(**json.loads((Path(folder) / "job.json").read_text()))


def lora() -> LoRAConfig:
    """Return the adapters of every run."""
    return LoRAConfig(rank=RANK, alpha=ALPHA)


def prepare(job: PairJob) -> None:
    """Write the folder of a job: its pairs, its batches and the first adapters."""
    pairs = Messages.read("train").pairs(job.batch_size * job.steps, job.seed)
    write_rows(job.data / "train.jsonl", pairs)
    write_rows(job.data / "test.jsonl", Messages.read("valid").pairs(32, 0))

    base = load_base(job.model)
    encoded = encode_pairs(rows_of_file(job.data / "train.jsonl"), base.tokenizer, LONGEST)
    sampler = PairSampler.of(encoded, job.batch_size, LONGEST, job.seed, True)
    orders = sampler.batches()
    batches = [[pairs[int(i)] for i in next(orders)] for _ in range(job.steps)]
    (Path(job.folder) / "batches.json").write_text(json.dumps(batches))
    mx.save_safetensors(str(job.start), attach(base, lora(), None, "dense", job.seed).tensors())
    (Path(job.folder) / "job.json").write_text(to_json(asdict(job)))


def _accuracy(encode: Any, job: PairJob) -> float:
    references = Messages.read("train").sample(job.references)
    queries = Messages.read("test").sample(job.queries)
    vectors = np.asarray(encode(references.texts)), np.asarray(encode(queries.texts))
    return nearest_accuracy(vectors[0], references.intents, vectors[1], queries.intents)


def ours(job: PairJob, turns: Turns) -> dict[str, Any]:
    """`train_pack` with multiple negatives; its observer waits between turns."""
    from mlx_packs import Observer, train_pack

    base = load_base(job.model)
    before = _accuracy(base.encode, job)

    class Steps(Observer):
        def on_phase_start(self, batches: int, done: int) -> None:
            turns.start()

        def on_step(self, line: dict) -> None:
            turns.step(line["loss"])

    config = TrainConfig(
        task="embedding",
        loss="mnrl",
        similarity_scale=SCALE,
        iters=job.steps,
        batch_size=job.batch_size,
        max_seq_length=LONGEST,
        learning_rate=RATE,
        lr_schedule="constant",
        optimizer_config={"adamw": {"bias_correction": True, "weight_decay": WEIGHT_DECAY}},
        max_grad_norm=0.0,
        val_batches=0,
        save_every=job.steps,
        steps_per_report=job.turn,
        seed=job.seed,
        awake=False,
    )
    run = train_pack(
        base,
        str(job.data),
        lora(),
        config,
        Path(job.folder) / "pack",
        callbacks=[Steps()],
        resume_adapter_file=str(job.start),
        overwrite=True,
    )
    with base.applied(run.pack):
        after = _accuracy(base.encode, job)
    return {"before": before, "after": after}


def sentence_transformers(job: PairJob, turns: Turns) -> dict[str, Any]:
    """sentence-transformers' model and loss, PEFT's adapters, torch's AdamW.

    Its modules stay in evaluation mode, since ours has no dropout.
    """
    import torch
    from peft import LoraConfig
    from safetensors.numpy import load_file
    from sentence_transformers import SentenceTransformer, losses

    model = SentenceTransformer(job.model, device="cpu")
    model.max_seq_length = LONGEST
    before = _accuracy(model.encode, job)

    start = load_file(job.start)
    paths = sorted({name.rpartition(".")[0] for name in start})
    model.add_adapter(LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=paths, lora_dropout=0.0))
    adapters = []
    for name, parameter in model[0].auto_model.named_parameters():
        parameter.requires_grad = ".lora_" in name
        if parameter.requires_grad:
            path, _, factor = name.partition(".lora_")
            with torch.no_grad():
                parameter.copy_(torch.tensor(start[f"{path}.lora_{factor[0].lower()}"].T))
            adapters.append(parameter)
    assert len(adapters) == len(start)

    loss_of = losses.MultipleNegativesRankingLoss(model, scale=SCALE)
    optimizer = torch.optim.AdamW(adapters, lr=RATE, weight_decay=WEIGHT_DECAY)
    model.eval()
    turns.start()
    for batch in job.batches:
        optimizer.zero_grad()
        columns = ("anchor", "positive")
        features = [model.tokenize([pair[column] for pair in batch]) for column in columns]
        loss = loss_of(features, None)
        loss.backward()
        optimizer.step()
        turns.step(loss.item())
    return {"before": before, "after": _accuracy(model.encode, job)}


TRAINERS = {OURS: ours, SENTENCE_TRANSFORMERS: sentence_transformers}


def main(arguments: Sequence[str]) -> int:
    name, folder = arguments
    turns = Turns()
    turns.finish(TRAINERS[name](PairJob.read(folder), turns))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
