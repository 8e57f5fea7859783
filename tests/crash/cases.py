"""What is killed: the runs and the commands, on bases of a few hundred KB."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import yaml

from mlx_packs import load_base
from mlx_packs.convert.interop import export_pack
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.encoders import all_pairs, write_encoder, write_pairs
from tests.helpers.packs import random_pack
from tests.helpers.rows import chat, write_rows

ANSWERS = "Yes. No. Maybe. Fine. Go. Stop. Ask me again, please. I will see what I can do.".split()
TEXTS = [{"text": f"def add_{i}(a):\n    return a + {i}\n"} for i in range(8)]
SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
COMMON = (
    "--iters 6 --save-every 2 --batch-size 2 --max-seq-length 32 --steps-per-report 2 "
    "--val-batches 1 --test-batches 1 --steps-per-eval 3 --learning-rate 1e-3 --matmul-path dense "
    "--lr-schedule constant --share-prefix off"
).split()

LORA = "--rank 2 --dropout 0.1".split()


@dataclass(frozen=True)
class Places:
    """What cases read, below a folder; each is written when it is first needed."""

    folder: Path

    @cached_property
    def base(self) -> Path:
        return write_checkpoint(self.folder / "base", **SMALL)

    @cached_property
    def encoder(self) -> Path:
        return write_encoder(self.folder / "encoder")

    @cached_property
    def chats(self) -> Path:
        rows = [chat(f"Say {i}.", answer) for i, answer in enumerate(ANSWERS)]
        return write_rows(self.folder / "chats", train=rows, valid=rows[:2], test=rows[:2])

    @cached_property
    def pairs(self) -> Path:
        return write_pairs(self.folder / "pairs", all_pairs()[:24], 8)

    @cached_property
    def recipe(self) -> Path:
        """A recipe of two phases."""
        texts = write_rows(self.folder / "texts", train=TEXTS, valid=TEXTS[:2], test=TEXTS[:2])
        broad = {"name": "broad", "data": str(texts), "iters": 4, "learning_rate": 1e-3}
        narrow = {"name": "narrow", "data": str(self.chats), "iters": 4, "learning_rate": 5e-4}
        file = self.folder / "phases.yaml"
        file.write_text(yaml.safe_dump({"phases": [broad, {**narrow, "replay": 0.25}]}))
        return file

    @cached_property
    def packs(self) -> tuple[Path, ...]:
        base = load_base(self.base)
        folders = self.folder / "p1", self.folder / "p2"
        return tuple(
            random_pack(base, seed=n).save(folder).path for n, folder in enumerate(folders)
        )

    @cached_property
    def exported(self) -> tuple[Path, ...]:
        folders = self.folder / "e1", self.folder / "e2"
        for pack, folder in zip(self.packs, folders, strict=True):
            export_pack(pack, "mlx-lm", folder)
        return folders


def _train(places: Places, *args: object, lora: list[str] = LORA) -> list[str]:
    source = ["--model", places.base, "--data", places.chats]
    return [str(arg) for arg in ("train", *source, "--out", "x", *COMMON, *lora, *args)]


def _phases(places: Places) -> list[str]:
    flags = dict(zip(COMMON[::2], COMMON[1::2], strict=True))
    del flags["--iters"], flags["--learning-rate"]
    source = ["train", "--model", str(places.base), "-c", str(places.recipe), "--out", "x"]
    return [*source, *sum(flags.items(), ()), *LORA]


def _embedding(places: Places) -> list[str]:
    args = "--task embedding --iters 6 --save-every 2 --batch-size 4 --steps-per-report 2 --rank 2"
    source = ["train", "--model", str(places.encoder), "--data", str(places.pairs), "--out", "x"]
    return [*source, *args.split()]


# Runs with a state of their own: the command of each, which is resumed with --resume.
RUNS: dict[str, Callable[[Places], list[str]]] = {
    "plain": lambda p: _train(p, "--keep-last", 2),
    "phases": _phases,
    "packing": lambda p: _train(p, "--packing"),
    "cached": lambda p: _train(p, "--num-layers", 1, "--cache-frozen", "on"),
    "embedding": _embedding,
    "full": lambda p: _train(p, "--fine-tune-type", "full", lora=[]),
    "accumulation": lambda p: _train(p, "--grad-accumulation-steps", 2),
}


def _on_base(places: Places, *args: object) -> list[str]:
    words = (*args, "--model", places.base, "--out", "x", "--overwrite")
    return [str(word) for word in words]


LOOSE = "--max-drift 100 --rows 2".split()


def _combine(places: Places, *weights: float) -> list[str]:
    packs = [f"{pack}={weight}" for pack, weight in zip(places.packs, weights, strict=True)]
    return _on_base(places, "combine", *packs, *LOOSE)


def _overwriting_train(places: Places, seed: int) -> list[str]:
    return _train(places, *"--iters 2 --save-every 1 --overwrite --seed".split(), seed)


# Commands that replace the folder ``x``, with arguments that make the old one and the new one.
OVERWRITES: dict[str, tuple[Callable, tuple, tuple]] = {
    "train": (_overwriting_train, (0,), (1,)),
    "quantize": (
        lambda p, *args: _on_base(p, "quantize", *args),
        (),
        ("--mode", "affine", "--max-shard-gb", "0.0005"),
    ),
    "merge": (lambda p, n: _on_base(p, "merge", p.packs[n], *LOOSE), (0,), (1,)),
    "combine": (_combine, (1, 1), (0.5, 0.2)),
    "import": (lambda p, n: _on_base(p, "import", p.exported[n]), (0,), (1,)),
    "pull": (lambda _, name: ["pull", name, "--out", "x", "--overwrite"], ("me/old",), ("me/new",)),
}


def weights_of(folder: Path) -> str:
    """Return a hash of all weights in a folder."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def hidden_names(folder: Path) -> list[str]:
    """Return the names below a folder that begin with a dot."""
    return sorted(str(p.relative_to(folder)) for p in folder.rglob(".*"))
