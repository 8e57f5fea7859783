"""A small base, on which a run takes a third of its time on the embedded one, and such runs."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.nn as nn
import pytest
from mlx.optimizers import Optimizer
from mlx.utils import tree_flatten

from mlx_packs import load_base, train_pack
from mlx_packs.packs.base import Base
from mlx_packs.reading import sha256
from mlx_packs.training.result import TrainRun
from mlx_packs.training.run_folder import RunFolder
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.observers import observe
from tests.helpers.rows import CHATS, chat, write_rows
from tests.helpers.runs import LORA, TRAIN, Lines

WORDS = "one two six ten red sun".split()
ROWS = [chat(f"Say {word}.", f"Yes, I say {word} to you.") for word in WORDS]
TIMED = ("tokens_per_s", "computed_tokens_per_s", "peak_gb")
OPTIONS = ("resume", "overwrite", "callbacks", "loss", "report_to", "progress")


def untimed_metrics(run: Path) -> list[dict]:
    """The lines of a run's metrics without what a clock decides."""
    return [{k: v for k, v in line.items() if k not in TIMED} for line in RunFolder(run).metrics()]


def interrupt_at(monkeypatch: pytest.MonkeyPatch, batch: int, number: int = signal.SIGTERM) -> None:
    """Let a signal arrive at a batch of runs."""

    def interrupt(line):
        if line["batch"] == batch:
            os.kill(os.getpid(), number)

    observe(monkeypatch, on_step=interrupt)


def kill_in(
    monkeypatch: pytest.MonkeyPatch, place: object, name: str, number: int = signal.SIGTERM
) -> None:
    """Let a signal arrive before a function of a module or class does its work."""
    function = getattr(place, name)

    def killed(*args, **kwargs):
        os.kill(os.getpid(), number)
        return function(*args, **kwargs)

    monkeypatch.setattr(place, name, killed)


def files_of(run: Path) -> dict[str, str]:
    """Hashes of the tensors of a run's last checkpoint."""
    return {f.name: sha256(f) for f in RunFolder(run).latest_checkpoint().glob("*.safetensors")}


def snapshot(model: nn.Module, optimizer: Optimizer) -> dict[str, list]:
    """All numbers that an update changes."""
    state = {"weights": model.trainable_parameters(), **optimizer.state}
    return {name: array.tolist() for name, array in tree_flatten(state)}


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory) -> Path:
    """A random dense base of two narrow blocks with the bundled tokenizer; tests only read it."""
    return write_checkpoint(tmp_path_factory.mktemp("small") / "base")


@pytest.fixture(scope="session")
def small(small_folder) -> Base:
    """The small base, loaded once; tests leave it as it was."""
    return load_base(small_folder)


@pytest.fixture(scope="session")
def trained(small, tmp_path_factory) -> Path:
    """A folder with rows ``d``, a pack ``o`` of `small` and its run ``o-run``; tests only read it."""
    folder = tmp_path_factory.mktemp("trained")
    write_rows(folder / "d", train=CHATS, valid=CHATS[:2])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train_pack(small, "d", LORA, TRAIN, "o")
    return folder


@pytest.fixture
def train(small, here) -> Callable[..., TrainRun]:
    """Train `small` by `TRAIN` with other settings, on six rows ``d`` in the current folder.

    ``train.lines`` are the lines that the last run showed.
    """
    write_rows(here / "d", train=ROWS, valid=ROWS[:1])

    def train(out="p", data="d", lora=LORA, **changes) -> TrainRun:
        display = Lines()
        train.lines = display.lines
        options = {"progress": display}
        options |= {name: changes.pop(name) for name in OPTIONS if name in changes}
        return train_pack(small, data, lora, replace(TRAIN, **changes), out, **options)

    return train
