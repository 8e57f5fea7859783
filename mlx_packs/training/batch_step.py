"""Steps on a batch in pieces: the same update up to rounding, with less in memory at a time.

Of several ranks each takes its share of a batch, which its own pieces are of.
"""

from dataclasses import dataclass

from ..data.dataset import Batch, Collate
from ..distributed.group import group
from ..objectives.objective import Objective
from ..runtime import mx
from .step import StartedStep, Stepper


@dataclass
class BatchStep:
    """The steps of a phase on whole batches.

    Gradients are sums over targets until their update (step.py), so that the pieces of a batch add
    up to it. Dropout draws other masks, as the shapes it draws for are other ones.
    """

    stepper: Stepper  # on the arrays of a piece
    objective: Objective
    collate: Collate  # which knows the pieces of a batch
    parts: int = 1  # pieces of a batch; it only grows

    def start(self, batch: Batch, last: bool, alone: bool) -> StartedStep:
        """Start the step on a prepared batch, as `Stepper.start`, one piece after the other."""
        if group().shares > 1:
            return self._start_share(batch, last)

        pieces = self._pieces(batch)
        if len(pieces) == 1:
            return self.stepper.start(pieces[0], last, alone)
        return self.stepper.start_pieces(pieces, last)

    def use_smaller_pieces(self, batch: Batch) -> bool:
        """Take batches in twice as many pieces; return whether ``batch`` can be cut so small."""
        if group().shares < group().size:  # the ranks of a pipeline take the same pieces
            return False
        if len(self._split(batch, 2 * self.parts)) <= len(self._split(batch, self.parts)):
            return False

        self.parts *= 2
        return True

    def first_piece(self, batch: Batch) -> Batch:
        """Return a part of a batch that is no larger than what is computed at a time."""
        parts = self.parts * group().shares
        if parts == 1:
            return batch
        return self._split(batch, parts)[0]

    def _start_share(self, batch: Batch, last: bool) -> StartedStep:
        """Start the step on this rank's share of a batch; its loss is the whole batch's."""
        ranks = group()
        with self.stepper.random_of_rank():
            shares = self.collate.split(batch, ranks.size)
            if ranks.rank < len(shares):
                step = self.stepper.start_pieces(self._pieces(shares[ranks.rank]), last)
            else:
                step = self.stepper.start_without_batch(last)
            total = ranks.sum(mx.array(step.loss, mx.float32))
            mx.async_eval(total)
        return StartedStep(total, batch.denominator, step.norm)

    def _pieces(self, batch: Batch) -> list[Batch]:
        if self.parts > 1:
            pieces = self._split(batch, self.parts)
            if len(pieces) > 1:
                return pieces
        return [batch]

    def _split(self, batch: Batch, parts: int) -> list[Batch]:
        """Return a batch in pieces, none of only padding."""
        if self.objective.compares_examples:
            return [batch]
        return [piece for piece in self.collate.split(batch, parts) if piece.denominator]
