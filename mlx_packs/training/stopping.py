"""A run that ends before its end: saved, with the way to continue."""

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import mlx.optimizers as optimizers
from mlx.utils import tree_flatten

from .. import signals
from ..adapters.trainable import Trainable
from ..errors import BaseChanged, PackError, RunStopped
from .checkpoint import save_checkpoint
from .settings import Run
from .state import TrainingState
from .watch import Guard


def interrupted(run: Run, checkpoint: Path, number: int) -> RunStopped:
    """Return the error that ends a run after a signal."""
    reason = "interrupted"
    if number != signal.SIGINT:
        reason += f" ({signal.Signals(number).name})"
    return RunStopped(reason, checkpoint, run.pack, exit_code=128 + number)


@contextmanager
def resumable(run: Run) -> Iterator[None]:
    """Raise `RunStopped` for a signal, a disk or a base that fails, if there is a checkpoint.

    The run folder contains none of another run any more.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        if (checkpoint := run.files.latest_checkpoint()) is None:
            raise
        raise interrupted(run, checkpoint, signals.number_of(error)) from None
    except PackError as error:
        checkpoint = run.files.latest_checkpoint()
        can_continue = error.code == "unwritable" or isinstance(error, BaseChanged)
        if isinstance(error, RunStopped) or not can_continue or checkpoint is None:
            raise
        reason = error.message.rstrip(".")
        raise RunStopped(reason, checkpoint, run.pack, error.code) from None


def write_checkpoint(
    run: Run,
    guards: Sequence[Guard],
    trainable: Trainable,
    optimizer: optimizers.Optimizer,
    state: TrainingState,
) -> Path:
    """Write a checkpoint and return its folder; if it cannot be written, nothing of it is left."""
    arrays = [*trainable.tensors().values(), *(a for _, a in tree_flatten(optimizer.state))]
    nbytes = sum(array.nbytes for array in arrays)

    def write() -> Path:
        for guard in guards:
            guard.before_checkpoint(nbytes)
        return save_checkpoint(run.folder, trainable, optimizer, state)

    try:
        return write()
    except PackError:
        if run.files.has_identity:
            raise
        return write()  # the folder was removed meanwhile
