"""Checkpoints: all that the next step depends on, written atomically.

A checkpoint holds the adapters, the optimizer's state, the random state, and how many batches were
taken (the order of the data is a function of the seed).
"""

import json
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import mlx.optimizers as optimizers
from mlx.utils import tree_flatten, tree_unflatten

from ..adapters.method import Trainable
from ..adapters.spec import check_shapes
from ..errors import PackError
from ..files import atomic_folder, atomic_write, save_tensors, to_json
from ..filesystem import sync
from ..reading import read_header
from ..runtime import mx
from .loss_scale import KEY, is_scaled
from .run_folder import LATEST, METRICS

ADAPTERS = "adapters.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
_ADDED_LATER = {"grad_norm", "window"}  # absent from the checkpoints of early versions


@dataclass
class Window:
    """Sums over the batches since the last report."""

    batches: int = 0
    targets: int = 0
    loss_sum: float = 0.0
    seconds: float = 0.0

    def add(self, loss: float, targets: int, seconds: float) -> None:
        """Count a batch with this mean loss."""
        self.batches += 1
        self.targets += targets
        self.loss_sum += loss * targets
        self.seconds += seconds

    @property
    def targets_per_s(self) -> float:
        """Throughput in supervised tokens, or in pairs."""
        return self.targets / self.seconds

    @property
    def batches_per_s(self) -> float:
        """Throughput in batches."""
        return self.batches / self.seconds


@dataclass
class TrainingState:
    """Progress of a run, without its tensors: a checkpoint stores it as ``state.json``."""

    batches: int = 0  # taken
    updates: int = 0
    trained_tokens: int = 0  # targets in those batches; pairs with ``--task embedding``
    train_s: float = 0.0  # spent in steps
    grad_norm: float = 0.0  # of the last update
    window: Window = field(default_factory=Window)  # for the next report

    def count(self, loss: float, targets: int, norm: float | None, seconds: float) -> None:
        """Count a batch; ``norm`` is the gradient norm of its update, None without an update."""
        self.batches += 1
        if norm is not None:
            self.updates += 1
            self.grad_norm = norm
        self.trained_tokens += targets
        self.train_s += seconds
        self.window.add(loss, targets, seconds)


def save_checkpoint(
    run: Path, trainable: Trainable, optimizer: optimizers.Optimizer, state: TrainingState
) -> Path:
    """Write a checkpoint into a run folder, let `latest` name it, and return its folder."""
    folder = run / f"step-{state.batches:06d}"
    with atomic_folder(folder, replace=True) as partial:
        save_tensors(partial / ADAPTERS, trainable.tensors())
        arrays = dict(tree_flatten(optimizer.state))
        arrays["random"] = mx.random.state[0]
        save_tensors(partial / OPTIMIZER, arrays)
        (partial / STATE).write_text(to_json(asdict(state)))
        if (run / METRICS).is_file():
            sync(
                run / METRICS, through_drive=False
            )  # the lines up to here; the folder is synced next
    atomic_write(run / LATEST, folder.name + "\n")
    return folder


def load_checkpoint(
    folder: Path, trainable: Trainable, optimizer: optimizers.Optimizer
) -> TrainingState:
    """Restore trainable parameters, optimizer and random state; return the progress of the run.

    The optimizer must be initialized for the parameters.

    Raises:
        PackError: if the checkpoint is damaged, or belongs to other parameters or another
            optimizer.
    """
    state = read_training_state(folder)
    try:
        tensors = mx.load(str(folder / ADAPTERS))
        arrays = mx.load(str(folder / OPTIMIZER))
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise _damaged(folder, error) from None
    if not is_scaled(optimizer):  # a run that began in float16 may go on in another dtype
        arrays = {name: a for name, a in arrays.items() if not name.startswith(f"{KEY}.")}
    arrays = _with_current_names(arrays, optimizer)
    expected = {name: a.shape for name, a in tree_flatten(optimizer.state)} | {"random": (2,)}
    file = folder / OPTIMIZER
    check_shapes(expected, {name: a.shape for name, a in arrays.items()}, str(file))
    key = arrays.pop("random")
    if key.dtype != mx.uint32:
        raise PackError(f"{file}: random: is {key.dtype}, must be uint32.", "mismatch")
    trainable.load(tensors, str(folder / ADAPTERS))
    set_random_state(key)
    optimizer.state = tree_unflatten(list(arrays.items()))
    return state


def has_loss_scale(folder: Path) -> bool:
    """Return whether a checkpoint is of a run in float16, whose loss is scaled."""
    try:
        return any(name.startswith(f"{KEY}.") for name in read_header(folder / OPTIMIZER)[0])
    except (PackError, OSError):
        return False  # loading it says what is wrong


def set_random_state(key: mx.array) -> None:
    """Let MLX's random numbers continue from a state."""
    high, low = key.tolist()
    mx.random.seed((high << 32) | low)  # the state is a key, and seed(n) sets it to key(n)


def read_training_state(folder: Path) -> TrainingState:
    """Return the progress stored in a checkpoint."""
    try:
        state = _from_json(TrainingState, json.loads((folder / STATE).read_text(encoding="utf-8")))
        if state.batches and not state.train_s:
            raise ValueError(f"{STATE}: train_s must be positive after {state.batches} batches")
        return state
    except (OSError, ValueError, TypeError) as error:
        raise _damaged(folder, error) from None


def _damaged(folder: Path, error: Exception) -> PackError:
    return PackError(f"{folder}: is not a complete checkpoint ({error}).", "unreadable")


def _from_json(cls: type, value: object, prefix: str = "") -> Any:
    """Return a dataclass from JSON, after a check of every name and number."""
    kinds = {f.name: f.type for f in fields(cls)}
    if not isinstance(value, dict) or not set(kinds) - _ADDED_LATER <= set(value) <= set(kinds):
        raise ValueError(f"{STATE} must hold {', '.join(prefix + name for name in kinds)}")
    entries = dict(value)
    for key, number in entries.items():
        if kinds[key] is Window:
            entries[key] = _from_json(Window, number, f"{key}.")
        elif type(number) not in (int, kinds[key]) or not math.isfinite(number) or number < 0:
            raise ValueError(
                f"{STATE}: {prefix}{key} must be a number of 0 or more, but is {number!r}"
            )
    return cls(**entries)


def _with_current_names(
    arrays: dict[str, mx.array], optimizer: optimizers.Optimizer
) -> dict[str, mx.array]:
    """Return a stored optimizer state under the names of a fresh one.

    They differ where blocks are checkpointed now and were not then, or the other way round.
    """

    def unwrapped(name: str) -> str:  # as if there were no `nn.recompute.RecomputedBlock`
        return name.replace(".block.", ".")

    current = {unwrapped(name): name for name, _ in tree_flatten(optimizer.state)}
    return {current.get(unwrapped(name), name): array for name, array in arrays.items()}
