"""The seam between the examples of a run and the loop over their batches."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from ..memory.plan import Shape
from ..objectives.objective import Batch
from ..optim import updates_of
from .phases import RunPhase
from .settings import Run


class Dataset(Protocol):
    """The examples of a run, encoded."""

    masks: Sequence[dict]  # some training examples as `data.masks` has them; empty without masks

    def counts(self) -> dict[str, int]:
        """Return the number of examples by split; in a run with phases ``<phase>/<split>``."""

    def shapes(self) -> set[Shape]:
        """Shapes of all training batches, as the memory plan counts them."""

    def batches(self, phase: RunPhase, start: int) -> Iterator[Batch]:
        """Training batches of a phase without end, from batch number ``start``."""

    def batches_per_epoch(self) -> int:
        """Return after how many batches of a run without phases each example was taken once."""

    def resized(self, phases: Sequence[RunPhase]) -> "Dataset":
        """Return the same examples for phases that differ in their number of batches."""

    def mean_inputs(self) -> float | None:
        """Return the mean of `state.real_inputs` over training batches.

        None where it is not known, or all batches are alike.
        """

    def rows(self, batch: Any) -> list[str]:
        """Return the rows of a batch as messages name them: ``train.jsonl:17``."""

    def validation(self, phase: RunPhase) -> Sequence[Any]:
        """Return the examples that `Objective.score` scores while a phase trains; they may be empty."""

    def held_out(self, phase: RunPhase) -> Sequence[Any]:
        """Return the examples that `Objective.score` scores before and after the run, for a phase."""

    def typical_rows(self) -> tuple[int, int] | None:
        """Rows of a typical batch that go through a frozen weight, and those through the head.

        The matmul path is chosen by them; None where there is no choice.
        """


def with_batches(run: Run, dataset: Dataset) -> tuple[Run, Dataset]:
    """Return a run and its examples with ``iters`` in the place of ``--epochs``, if it has that."""
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
