"""``--epochs``: the number of batches of a run by how often its examples are taken."""

from ..optim import updates_of
from .dataset import Dataset
from .settings import Run


def with_batches(run: Run, dataset: Dataset) -> tuple[Run, Dataset]:
    """Return a run and its examples with ``iters`` in the place of ``epochs``, where it has that."""
    if (epochs := run.train.epochs) is None:
        return run, dataset
    each = dataset.batches_per_epoch()
    batches = max(1, round(epochs * each))
    settings = {"epochs": None, "iters": batches}
    if run.train.picks_best:  # each of a few short epochs is evaluated
        settings["steps_per_eval"] = min(run.train.steps_per_eval, each)

    run = run.with_settings(settings, {})
    updates = updates_of(run.train)
    run.display.line(
        "epochs", f"{epochs:g} of {each:,} batches: {batches:,} batches, {updates:,} updates"
    )
    return run, dataset.resized(run.phases)
