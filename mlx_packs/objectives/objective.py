"""The objective of a run: the interface between a task and the loop over its batches.

The loop knows an objective by this protocol alone. It draws batches (through `prefetch`, in a
thread of their own), turns each into arrays, takes steps on `loss`, and scores the model with
`score`. The content of a batch is agreed between the task's data set and its objective.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from ..runtime import mx
from .score import Score

Arrays = tuple[mx.array, ...]
Loss = Callable[..., tuple[mx.array, mx.array]]


class Batch(Protocol):
    """The part of a batch that the loop itself reads."""

    @property
    def count(self) -> int:
        """Number of targets, in the objective's unit."""

    @property
    def terms(self) -> int:
        """Number of terms that its loss is a mean of: its targets, or the rows that have them."""


class Inputs(Protocol):
    """The conversion of batches to arrays; `prefetch` and `close` have defaults."""

    def arrays(self, batch: Any) -> Arrays:
        """Return the arrays of a batch for `Objective.loss`; each set of shapes is compiled."""

    def prefetch(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the same batches, with what can be computed on the CPU before their step."""
        return batches

    def close(self) -> None:
        """Release files and memory that outlive a batch."""


class Objective(Inputs, Protocol):
    """The computation on a batch.

    The model, and whatever else the computation needs, is bound when the objective is made.

    Attributes:
        unit: what targets are, as a plural: ``tokens``, ``pairs``. It is part of the names of logged values.
    """

    unit: str

    def loss(self, *arrays: mx.array) -> tuple[mx.array, mx.array]:
        """Sum of the loss over a batch's targets, and what the sum is divided by.

        Both are scalars. Sums and counts of the batches of one update are added before the
        division, so that N small batches equal one large one.
        """

    def of_phase(self, start: int) -> "Objective":
        """Return the objective of the phase that has ``start`` batches before it."""
        return self

    def begin_phase(self, start: int, fresh: bool) -> None:
        """Prepare for the steps of a phase, which has ``start`` batches before it.

        ``fresh`` is whether no batch of the phase was taken, so that the model is as it begins.
        """

    def facts(self) -> dict[str, float]:
        """Return entries for the next report of a training run, about the batches since the last."""
        return {}

    def split(self, batch: Any, parts: int) -> Sequence[Any]:
        """Return a batch in at most ``parts`` pieces whose sums and counts add up to its own.

        A batch whose examples are compared with each other is one piece.
        """
        return [batch]

    def share(self, batch: Any, rank: int, size: int) -> Any | None:
        """Return the part of a batch that one of ``size`` ranks takes; None where it has none.

        Sums and counts of the parts add up to those of the batch; all ranks ask for theirs.
        """
        raise NotImplementedError

    def score(self, batches: Sequence[Any], advance: Callable[[], None] | None = None) -> Score:
        """Score the model in evaluation mode; ``advance`` is called after each batch."""

    def validate(self, batches: Sequence[Any]) -> Score:
        """Score the model while it trains, which may measure more than `score`."""
        return self.score(batches)
