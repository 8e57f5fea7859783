"""``--epochs``: the number of batches of a run by how often its examples are taken."""

from dataclasses import replace

from .dataset import Dataset
from .phases import resolve_phases
from .settings import Run


def with_batches(run: Run, dataset: Dataset) -> tuple[Run, Dataset]:
    """Return a run and its examples with ``iters`` in the place of ``epochs``, where it has that."""
    if (epochs := run.train.epochs) is None:
        return run, dataset
    each = dataset.batches_per_epoch()
    train = replace(run.train, epochs=None, iters=max(1, round(epochs * each)))
    if train.picks_best:  # each of a few short epochs is evaluated
        train = replace(train, steps_per_eval=min(train.steps_per_eval, each))
    updates = -(-train.iters // train.grad_accumulation_steps)
    run.display.line(
        "epochs", f"{epochs:g} of {each:,} batches: {train.iters:,} batches, {updates:,} updates"
    )
    run = replace(run, train=train, phases=resolve_phases(train, run.columns))
    return run, dataset.resized(run.phases)
