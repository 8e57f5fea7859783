"""The objective of a phase: the interface between a task and the loop over its batches.

The loop knows an objective by this protocol alone. It draws batches (through `ahead`, in a thread
of their own), prepares each, takes steps on `loss`, and scores the model with `score`. The arrays
of a batch are agreed between the task's `Collate` and its objective.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from ..nn.images import names_images
from ..runtime import mx
from ..vision.images import for_step
from .score import Score

if TYPE_CHECKING:
    from mlx.optimizers import Optimizer

    from ..data.dataset import Batch, Dataset, Layout

Inputs = Mapping[str, mx.array]
Loss = Callable[..., tuple[mx.array, mx.array]]  # of `Inputs` and a `Layout`

_TOKENS = ("tokens", "prefix", "root")  # inputs that are tokens


def arrays_of(batch: "Batch") -> dict[str, mx.array]:
    """Return the arrays of a batch for `Objective.loss`; each set of shapes is compiled."""
    inputs = batch.inputs
    if any(names_images(inputs[name]) for name in _TOKENS if name in inputs):
        inputs = for_step(inputs)

    arrays = {}
    for name, values in inputs.items():
        arrays[name] = values if isinstance(values, mx.array) else mx.array(values)
    return arrays


class Objective(Protocol):
    """The computation on a batch.

    The model, and whatever else the computation needs, is bound when the objective is made.

    Attributes:
        unit: what targets are, as a plural: ``tokens``, ``pairs``; a part of logged names.
        compares_examples: whether the loss compares examples of a batch, which is one piece then.
    """

    unit: str
    compares_examples: bool = False

    def ahead(self, batch: "Batch") -> "Batch":
        """Return a batch with what another thread can compute before its step, without MLX."""
        return batch

    def prepare(self, batch: "Batch") -> "Batch":
        """Return a batch with all arrays that `loss` reads, as its step begins."""
        return batch

    def loss(self, inputs: Inputs, layout: "Layout" = ()) -> tuple[mx.array, mx.array]:
        """Sum of the loss over a batch's targets, and what the sum is divided by.

        Both are scalars. Sums and counts of the batches of one update are added before the
        division, so that N small batches equal one large one.
        """

    def begin(self, fresh: bool) -> None:
        """Prepare for the steps of a phase.

        ``fresh`` is whether no batch of the phase was taken, so that the model is as it begins.
        """

    def make_stepper(self, optimizer: "Optimizer", *others: Any) -> Any | None:
        """Return what takes steps, as `training.step.Stepper`; None for that class itself."""
        return None

    def facts(self) -> dict[str, float]:
        """Return entries for the next report of a run, about the batches since the last."""
        return {}

    def score(self, data: "Dataset", advance: Callable[[], None] | None = None) -> Score:
        """Score the model in evaluation mode; ``advance`` is called after each batch."""

    def validate(self, data: "Dataset") -> Score:
        """Score the model while it trains, which may measure more than `score`."""
        return self.score(data)

    def score_trained(self, batch: "Batch") -> Score:
        """Score the model on a prepared training batch, to see that it still works."""

    def close(self) -> None:
        """Release files and memory that outlive a batch."""


class ScoredObjective(Objective):
    """An objective that a function scores on batches; one that only trains needs none."""

    _score: Callable[..., Score] | None  # of the objective, batches, and a function called by each

    def score(self, data: "Dataset", advance: Callable[[], None] | None = None) -> Score:
        return self._score(self, data.once(), advance)

    def score_trained(self, batch: "Batch") -> Score:
        return self._score(self, [batch])
