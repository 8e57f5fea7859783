"""The encoded examples of the phases of a run."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..data.dataset import Dataset, ExampleSet, Shape, first_examples
from .phases import RunPhase


class PhaseTask:
    """What a task knows of the examples of a phase that it has encoded.

    A task of another package must have what is abstract; one of several tasks leaves it to them.
    """

    @abstractmethod
    def evaluation(self, phase: RunPhase, examples: Any, chosen: np.ndarray) -> Dataset:
        """Return what `Objective.score` scores, of a split the examples with these indices."""
        raise NotImplementedError

    @abstractmethod
    def sampled(self, data: "PhaseData") -> np.ndarray:
        """Return which held-out examples a phase is evaluated on by default, in random order."""
        raise NotImplementedError

    def typical_rows(self, data: "PhaseData") -> tuple[int | tuple[int, ...], int] | None:
        """Rows of a typical batch through a frozen weight and the head; None if all is dense.

        Where a batch takes several passes over the blocks, the rows of each.
        """
        return None

    def mean_inputs(self, data: "PhaseData") -> float | None:
        """Return the mean of `Batch.computed`; None if it is not known, or batches are alike."""
        return None


@dataclass(frozen=True)
class PhaseData:
    """The examples of a phase, encoded by its task."""

    task: PhaseTask
    phase: RunPhase
    splits: Mapping[str, ExampleSet]
    train: Dataset  # its own examples, and replayed ones of phases before it

    @property
    def held_out_split(self) -> str:
        """The split that the phase is evaluated on."""
        return "test" if "test" in self.splits else "valid"

    @property
    def held_out_examples(self) -> Any:
        return self.splits[self.held_out_split]

    def counts(self) -> dict[str, int]:
        """Return the number of examples by split, as manifests name it."""
        return {self.phase.manifest_key(split): own.count for split, own in self.splits.items()}

    def shapes(self) -> set[Shape]:
        """Return the shapes of all training batches, as the memory plan counts them."""
        return self.train.shapes(self.phase.train.iters)

    def validation(self) -> Dataset | None:
        """Return what `Objective.validate` scores; None if the phase is not validated."""
        return self._validation

    def held_out(self) -> Dataset:
        """Return what `Objective.score` scores before and after the run."""
        return self._held_out

    @cached_property
    def _validation(self) -> Dataset | None:
        """As `validation`; what its examples have in common is searched for once."""
        batches = self.phase.train.val_batches
        if "valid" not in self.splits or not batches:
            return None
        return self._first(self.splits["valid"], batches)

    @cached_property
    def _held_out(self) -> Dataset:
        """As `held_out`, likewise."""
        batches = self.phase.train.test_batches
        if batches is not None:
            return self._first(self.held_out_examples, batches)
        return self.task.evaluation(self.phase, self.held_out_examples, self.task.sampled(self))

    def _first(self, examples: ExampleSet, batches: int) -> Dataset:
        chosen = first_examples(examples.count, self.phase.train.batch_size, batches)
        return self.task.evaluation(self.phase, examples, chosen)


def counts_of(data: Sequence[PhaseData]) -> dict[str, int]:
    """Return the number of examples by split; in a run with phases ``<phase>/<split>``."""
    return {key: count for each in data for key, count in each.counts().items()}
