"""What is trained: examples, batches and first adapters that all trainers of a run share."""

import gzip
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from mlx.utils import tree_flatten

from mlx_packs import DataConfig, LoRAConfig, load_base
from mlx_packs.adapters.attach import attach
from mlx_packs.data.encoding import EncodingOptions, Examples, encode
from mlx_packs.data.sampler import Sampler
from mlx_packs.data.shapes import sequence_inputs
from mlx_packs.evaluation.rows import evaluation_rows
from mlx_packs.files import atomic_folder, to_json
from mlx_packs.nn.frozen_weight import frozen_weight
from mlx_packs.nn.quantized import quantized_modules
from mlx_packs.packs.base import Base
from mlx_packs.runtime import dtype_name, mx, on_cpu

from . import files
from .beginnings import BEGINNINGS, beginning_with

RANK, ALPHA = 16, 32.0
RATE = 1e-3
WEIGHT_DECAY = 0.01
# Modules that mlx-lm and PEFT adapt by their last name, as ours does by default.
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Part:
    """A data set, how it is trained on, and how the result is evaluated.

    max_seq_length: in tokens, at least the longest example.   rows: held-out examples.   metric: of
    generated answers, ``none`` for perplexity only.   beginning: of `BEGINNINGS`, that all rows get.
    """

    data: str
    batch_size: int
    steps: int
    max_seq_length: int
    rows: int
    metric: str = "none"
    beginning: str = ""


PARTS = {
    "banking77": Part("banking77", 8, 80, 256, 100, "exact"),
    "tldr": Part("tldr", 8, 40, 256, 100),
    "gsm8k": Part("gsm8k", 4, 30, 512, 50),
}
# Rows that begin alike, as with --share-prefix.
SHARED_PARTS = {
    "banking77-labels": Part("banking77", 8, 4, 640, 16, beginning="labels"),
    "tldr-commands": Part("tldr", 8, 10, 384, 16, beginning="commands"),
    "gsm8k-shots": Part("gsm8k", 4, 4, 1280, 16, beginning="shots"),
}
# What a user would run: half a day for three seeds.
LARGE = Part("banking77", 32, 300, 256, 300, "exact")


@dataclass(frozen=True)
class Job:
    """One seed of a part, as its trainers read it from ``job.json``."""

    part: str
    seed: int
    batch_size: int
    steps: int
    max_seq_length: int
    rows: int
    metric: str
    turn: int  # steps of a trainer before the next one has its turn
    model: str  # the checkpoint or GGUF, quantized
    dense: str  # the same weights in float32, for mlx-lm and PEFT
    folder: str

    @property
    def data(self) -> Path:
        """The folder of its examples."""
        return Path(self.folder) / "data"

    @property
    def batches(self) -> list[list[tuple[list[int], int]]]:
        """The rows of each batch: tokens, and the number of the first one that is a target."""
        return json.loads((Path(self.folder) / "batches.json").read_text())

    @property
    def start(self) -> Path:
        """The first adapters, in mlx-lm's names."""
        return Path(self.folder) / "start.safetensors"

    def adapters(self, trainer: str) -> Path:
        """The adapters that a trainer has written, in mlx-lm's names."""
        return Path(self.folder) / f"{trainer}.safetensors"

    @classmethod
    def read(cls, folder: str | Path) -> "Job":
        """Read the job of a folder."""
        return cls(**json.loads((Path(folder) / "job.json").read_text()))


def lora() -> LoRAConfig:
    """Return the adapters of every run."""
    return LoRAConfig(rank=RANK, alpha=ALPHA)


def prepare(part: Part, name: str, seed: int, turn: int, model: Path, work: Path) -> Job:
    """Write the folder of a job: its examples, its batches and the first adapters."""
    size = f"{part.batch_size}x{part.steps}"
    folder = work / f"{name}-{size}-seed{seed}"
    job = Job(
        name,
        seed,
        part.batch_size,
        part.steps,
        part.max_seq_length,
        part.rows,
        part.metric,
        turn,
        str(model),
        str(work / "dense"),
        str(folder),
    )
    if (folder / "job.json").exists():
        return Job.read(folder)

    rows = read_rows(part.data, "train")
    order = np.random.default_rng(seed).permutation(len(rows))
    count = part.batch_size * part.steps
    if count > len(rows):  # then a second epoch begins
        count = len(rows)
    folder.mkdir(parents=True, exist_ok=True)
    chosen = [rows[i] for i in order[:count]]
    held_out = read_rows(part.data, "test")[: part.rows]
    if part.beginning:
        text = BEGINNINGS[part.beginning](rows)
        chosen, held_out = beginning_with(chosen, text), beginning_with(held_out, text)
    write_rows(job.data / "train.jsonl", chosen)
    write_rows(job.data / "test.jsonl", held_out)

    base = load_base(model)
    (folder / "batches.json").write_text(json.dumps(_batches(base, job)))
    adapters = attach(base, lora(), None, "dense", seed).tensors()
    mx.save_safetensors(str(job.start), adapters)
    (folder / "job.json").write_text(to_json(asdict(job)))
    return job


def _batches(base: Base, job: Job) -> list[list[tuple[list[int], int]]]:
    """Return the batches that our sampler makes of the job's examples."""
    columns = DataConfig(data=str(job.data))
    options = EncodingOptions(None, job.max_seq_length, base.vocab_size)
    examples = encode(evaluation_rows(columns, "train"), base.tokenizer, columns, options)
    inputs = sequence_inputs(job.max_seq_length)
    orders = Sampler(examples.lengths, job.batch_size, inputs, job.seed).batches()
    return [[_row(examples, i) for i in next(orders)] for _ in range(job.steps)]


def _row(examples: Examples, i: int) -> tuple[list[int], int]:
    """Return the tokens of an example up to its last target, and where its targets start."""
    example = examples.items[int(i)]
    targets = np.flatnonzero(example.target)
    first, last = int(targets[0]), int(targets[-1])
    if len(targets) != last - first + 1:
        raise ValueError(f"{example}: its targets are not one piece")
    return [int(token) for token in example.tokens[: last + 1]], first


def read_rows(data: str, split: str) -> list[dict]:
    """Return the rows of a real data set."""
    with gzip.open(files.data(data) / f"{split}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def write_rows(file: Path, rows: Sequence[dict]) -> None:
    """Write rows as JSONL."""
    file.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    file.write_text(text, encoding="utf-8")


def write_dense(model: Path, out: Path) -> Path:
    """Write the dense weights of a quantized checkpoint or GGUF, and its tokenizer.

    They are float32 on a CPU and bfloat16 on a GPU, as ours has its activations there.
    """
    if out.exists():
        return out

    base = load_base(model)
    dtype = mx.float32 if on_cpu() else mx.bfloat16
    modules = dict(quantized_modules(base.model))
    tensors = {
        name: value.astype(dtype)
        for name, value in tree_flatten(base.model.parameters())
        if name.rpartition(".")[0] not in modules or name.endswith(".bias")
    }
    for path, module in modules.items():
        tensors[f"{path}.weight"] = frozen_weight(module).dense().astype(dtype)

    dropped = ("quantization", "quantization_config")
    config = {key: value for key, value in base.config.items() if key not in dropped}
    with atomic_folder(out) as temporary:
        mx.save_safetensors(str(temporary / "model.safetensors"), tensors, {"format": "pt"})
        config["torch_dtype"] = dtype_name(dtype)
        (temporary / "config.json").write_text(to_json(config))
        base.tokenizer.save_pretrained(temporary)
    return out
