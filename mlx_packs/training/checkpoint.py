"""Checkpoints: all that the next step depends on, written atomically, with the hash of every file.

A checkpoint contains the adapters, the optimizer's state, the random state, and how many batches
were taken (the order of the data is a function of the seed).
"""

import shutil
from pathlib import Path

import mlx.optimizers as optimizers
from mlx.utils import tree_flatten, tree_unflatten

from ..adapters.spec import check_shapes
from ..adapters.trainable import Trainable
from ..display import size
from ..distributed.group import group
from ..errors import PackError
from ..files import atomic_folder
from ..filesystem import sync
from ..reading import read_header
from ..runtime import mx, set_random_state
from ..tensors import save_tensors
from .state import (
    ADAPTERS,
    METRICS,
    OPTIMIZER,
    STEP_PREFIX,
    TrainingState,
    check_checkpoint,
    damaged,
    read_training_state,
    write_state,
)
from .update import KEY, is_scaled

_SPARE = 1 << 20  # bytes for what else a run writes


def save_checkpoint(
    run: Path, trainable: Trainable, optimizer: optimizers.Optimizer, state: TrainingState
) -> Path:
    """Write a checkpoint and return its folder; if it cannot be written, nothing of it is left."""
    tensors = trainable.tensors()
    arrays = group().union(dict(tree_flatten(optimizer.state)))
    arrays["random"] = mx.random.state[0]
    _check_space(run, sum(array.nbytes for array in (*tensors.values(), *arrays.values())))

    folder = run / f"{STEP_PREFIX}{state.batches:06d}"
    with atomic_folder(folder, replace=True) as partial:
        save_tensors(partial / ADAPTERS, tensors)
        save_tensors(partial / OPTIMIZER, arrays)
        write_state(partial, state)
        if (run / METRICS).is_file():  # the lines up to here; the folder is synced next
            sync(run / METRICS, through_drive=False)
    return folder


def _check_space(run: Path, nbytes: int) -> None:
    """Raise a PackError if the disk has no room for the next checkpoint."""
    if not run.is_dir():
        raise PackError(f"{run}: was removed or moved while the run lasted.", "unwritable")
    needed = nbytes + _SPARE
    if (free := shutil.disk_usage(run).free) < needed:
        raise PackError(
            f"{run}: {size(free)} are free, but a checkpoint takes {size(needed)}. Free some "
            "space.",
            "unwritable",
        )


def load_checkpoint(
    folder: Path, trainable: Trainable, optimizer: optimizers.Optimizer
) -> TrainingState:
    """Restore parameters, optimizer and random state; return the progress of the run."""
    state = read_training_state(folder)
    try:
        tensors = mx.load(str(folder / ADAPTERS))
        arrays = mx.load(str(folder / OPTIMIZER))
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise damaged(folder, error) from None

    if not is_scaled(optimizer):  # a run that began in float16 may go on in another dtype
        arrays = {name: a for name, a in arrays.items() if not name.startswith(f"{KEY}.")}
    arrays = _with_current_names(arrays, optimizer)
    expected = {name: a.shape for name, a in tree_flatten(optimizer.state)} | {"random": (2,)}
    if group().batch_shares < group().size:  # a pipeline's file has the arrays of all ranks
        arrays = {name: a for name, a in arrays.items() if name in expected}

    file = folder / OPTIMIZER
    check_shapes(expected, {name: a.shape for name, a in arrays.items()}, str(file))
    key = arrays.pop("random")
    if key.dtype != mx.uint32:
        raise PackError(f"{file}: random: is {key.dtype}, must be uint32.", "mismatch")

    trainable.load(tensors, str(folder / ADAPTERS))
    set_random_state(key)
    optimizer.state = tree_unflatten(list(arrays.items()))
    return state


def load_weights(folder: Path, trainable: Trainable) -> None:
    """Restore the trainable parameters of a checkpoint alone, once its files are checked."""
    check_checkpoint(folder)
    trainable.load(mx.load(str(folder / ADAPTERS)), str(folder / ADAPTERS))


def has_loss_scale(folder: Path) -> bool:
    """Return whether a checkpoint is of a run in float16, whose loss is scaled."""
    try:
        return any(name.startswith(f"{KEY}.") for name in read_header(folder / OPTIMIZER)[0])
    except (PackError, OSError):
        return False  # loading it reports the fault


def _with_current_names(
    arrays: dict[str, mx.array], optimizer: optimizers.Optimizer
) -> dict[str, mx.array]:
    """Return a stored optimizer state under the names of a fresh one, which recomputing changes."""

    def unwrapped(name: str) -> str:  # as if there were no `nn.recompute.RecomputedBlock`
        return name.replace(".block.", ".")

    current = {unwrapped(name): name for name, _ in tree_flatten(optimizer.state)}
    return {current.get(unwrapped(name), name): array for name, array in arrays.items()}
