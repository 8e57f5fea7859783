"""Steps on a batch in pieces: the same update up to rounding, with less in memory at a time."""

from dataclasses import dataclass
from typing import Any

from ..objectives.objective import Objective
from .step import StartedStep, Stepper


@dataclass
class MicroBatches:
    """The number of pieces of a run's batches; it only grows.

    Gradients are sums over targets until their update (step.py), so that the pieces of a batch add
    up to it. Dropout draws other masks, as the shapes it draws for are other ones.
    """

    parts: int = 1

    def halve(self, objective: Objective, batch: Any) -> bool:
        """Double the number of pieces; return whether ``batch`` has so many."""
        if len(objective.split(batch, 2 * self.parts)) <= len(objective.split(batch, self.parts)):
            return False
        self.parts *= 2
        return True

    def start(
        self, stepper: Stepper, objective: Objective, batch: Any, last: bool, alone: bool
    ) -> StartedStep:
        """Start the step on a batch, as `Stepper.start`; of several pieces each waits for the one before."""
        pieces = objective.split(batch, self.parts) if self.parts > 1 else [batch]
        if len(pieces) <= 1:
            return stepper.start(objective.arrays(batch), batch.terms, last, alone)
        stepper.wait_for_each()
        total = 0.0
        for piece in pieces:
            ends = last and piece is pieces[-1]
            step = stepper.start(objective.arrays(piece), piece.terms, ends, alone=False)
            total = total + step.loss
        return StartedStep(total, batch.terms, step.norm)
