"""The run folder: step-NNNNNN checkpoints, the pointer `latest`, metrics.jsonl, config.json.

A checkpoint is whole or absent. It holds all that the next step depends on: adapters, optimizer,
random state, and how many batches were taken (the order of the data is a function of the seed).
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import mlx.optimizers as optimizers
from mlx.utils import tree_flatten, tree_unflatten

from .adapters import Attached
from .errors import PackError
from .files import save_tensors, to_json, whole_folder, write_whole
from .runtime import mx

ADAPTERS = "adapters.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"


@dataclass
class Cursor:
    """How far a run is: batches taken, updates made, targets learned, seconds spent."""

    batches: int = 0
    updates: int = 0
    trained_tokens: int = 0
    train_s: float = 0.0

    def count(self, targets: int, update: bool, seconds: float) -> None:
        """Another batch was taken."""
        self.batches += 1
        self.updates += int(update)
        self.trained_tokens += targets
        self.train_s += seconds


def step_folder(run: Path, batches: int) -> Path:
    """The folder of the checkpoint after so many batches."""
    return run / f"step-{batches:06d}"


def save_checkpoint(
    run: Path, attached: Attached, optimizer: optimizers.Optimizer, cursor: Cursor
) -> Path:
    """Write a checkpoint and point `latest` at it."""
    folder = step_folder(run, cursor.batches)
    with whole_folder(folder, replace=True) as partial:
        save_tensors(partial / ADAPTERS, attached.tensors())
        state = dict(tree_flatten(optimizer.state))
        state["random"] = mx.random.state[0]
        save_tensors(partial / OPTIMIZER, state)
        (partial / STATE).write_text(to_json(vars(cursor)))
    write_whole(run / "latest", folder.name + "\n")
    return folder


def clear_run(run: Path) -> None:
    """Remove what an earlier run left in its folder: checkpoints, pointer, metrics."""
    for folder in run.glob("step-*"):
        shutil.rmtree(folder)
    for name in ("latest", "metrics.jsonl"):
        (run / name).unlink(missing_ok=True)


def latest_checkpoint(run: Path) -> Path | None:
    """The newest checkpoint of a run folder, or None."""
    pointer = run / "latest"
    if not pointer.is_file():
        return None
    folder = run / pointer.read_text().strip()
    return folder if folder.is_dir() else None


def load_checkpoint(folder: Path, attached: Attached, optimizer: optimizers.Optimizer) -> Cursor:
    """Set adapters, optimizer and random state from a checkpoint.

    Raises: PackError if it does not belong to this run's adapters.
    """
    try:
        cursor = Cursor(**json.loads((folder / STATE).read_text()))
        tensors = mx.load(str(folder / ADAPTERS))
        state = mx.load(str(folder / OPTIMIZER))
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise PackError(f"{folder}: is not a whole checkpoint ({error}).") from None
    attached.load(tensors, str(folder / ADAPTERS))
    high, low = state.pop("random").tolist()
    mx.random.seed((high << 32) | low)  # the state is a key, and seed(n) sets it to key(n)
    optimizer.state = tree_unflatten(list(state.items()))
    return cursor
