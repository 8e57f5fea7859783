"""Steps on a batch in pieces: the same update up to rounding, with less in memory at a time.

Of several ranks each takes its share of a batch, which its own pieces are of.
"""

from dataclasses import dataclass
from typing import Any

from ..distributed.group import group
from ..objectives.objective import Arrays, Objective
from ..runtime import mx
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
        if group().shares < group().size:  # the ranks of a pipeline take the same pieces
            return False
        if len(objective.split(batch, 2 * self.parts)) <= len(objective.split(batch, self.parts)):
            return False
        self.parts *= 2
        return True

    def start(
        self, stepper: Stepper, objective: Objective, batch: Any, last: bool, alone: bool
    ) -> StartedStep:
        """Start the step on a batch, as `Stepper.start`; of several pieces each waits for the one before."""
        if group().shares > 1:
            return self._start_share(stepper, objective, batch, last)
        pieces = self._pieces(objective, batch)
        if len(pieces) == 1:
            return stepper.start(*pieces[0], last, alone)
        return stepper.start_pieces(pieces, last)

    def _start_share(
        self, stepper: Stepper, objective: Objective, batch: Any, last: bool
    ) -> StartedStep:
        """Start the step on this rank's share of a batch; its loss is that of the whole batch."""
        ranks = group()
        with stepper.random_of_rank():
            share = objective.share(batch, ranks.rank, ranks.size)
            if share is None:
                step = stepper.start_without_batch(last)
            else:
                step = stepper.start_pieces(self._pieces(objective, share), last)
            total = ranks.sum(mx.array(step.loss, mx.float32))
            mx.async_eval(total)
        return StartedStep(total, batch.terms, step.norm)

    def _pieces(self, objective: Objective, batch: Any) -> list[tuple[Arrays, int]]:
        """Return the arrays of every piece of a batch, and its number of targets."""
        pieces = objective.split(batch, self.parts) if self.parts > 1 else []
        pieces = pieces if len(pieces) > 1 else [batch]
        return [(objective.arrays(piece), piece.terms) for piece in pieces]
