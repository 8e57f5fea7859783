"""One compiled training step, and the accumulation of several batches into one update.

Gradients are of the *sum* over targets and are divided by their number once, at the update,
so that N small batches equal one large one whatever their lengths. For the same reason the pieces
of a batch add up to it: `BatchStep` takes one in pieces, or the share of a rank.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import mlx.nn as nn
import mlx.optimizers as optimizers
from mlx.utils import tree_map

from .. import runtime
from ..data.dataset import Batch, Collate, Layout
from ..distributed.group import group, summed_over_ranks
from ..objectives.objective import Inputs, Loss, Objective, arrays_of
from ..runtime import is_traced, mx, set_random_state
from .update import Update

# returns the results of losses, which are computed together (nn/recompute.py)
Together = Callable[[Sequence[Callable[[], tuple]]], list[tuple]]


@dataclass(frozen=True)
class StartedStep:
    """A step that MLX computes or has computed."""

    loss: mx.array  # the mean over the batch's targets, or their sum
    count: int  # what the sum is divided by; 1 for a mean
    norm: mx.array | None  # of the gradient of its update; None without one

    def read(self) -> tuple[float, float]:
        """Return mean loss and gradient norm (0 without an update), once the step is computed."""
        norm = 0.0 if self.norm is None else self.norm.item()
        return self.loss.item() / self.count, norm


class Stepper:
    """Compiled steps over batches of one run.

    Args:
        model: has the trainable parameters.
        loss: of the arrays and the layout of a batch: the sum over its targets, and what the sum is
            divided by (`Objective.loss`).
        optimizer: initialized for the trainable parameters; a scale of the loss is part of its
            state (update.py).
        max_grad_norm: gradients of a larger norm are scaled down to it; None or 0 never.
        skips: whether an update that is not finite changes nothing (update.py).
        exchange_dtype: in which ranks exchange gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: optimizers.Optimizer,
        max_grad_norm: float | None,
        skips: bool = False,
        exchange_dtype: mx.Dtype = mx.float32,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self._exchange_dtype = exchange_dtype
        self.ahead = int(runs_ahead())  # steps that may be in flight before one is read
        self._evaluate = mx.async_eval if self.ahead else mx.eval

        self.state = [model.state, optimizer.state, mx.random.state]
        self.shapes: set[tuple] = set()  # of the arrays of all batches so far
        self.traces = 0  # functions that MLX has compiled
        self.waiting = 0  # batches whose gradients wait for the rest of their update
        self._pending: tuple = ()

        # compiled, a step would keep the weights that it reads as constants
        self._compiles = not hasattr(model, "blocks_on_disk")

        self.update = update = Update(model, optimizer, max_grad_norm, skips)
        self.scaled = update.is_scaled
        self.loss = update.guarded(loss)
        value_and_grad = nn.value_and_grad(model, self.loss)

        def whole(inputs: Inputs, layout: Layout) -> tuple:
            values, grads = value_and_grad(inputs, layout)
            total, count = update.unscaled(values)
            return total / count, update.apply(grads, count)

        def gather(inputs: Inputs, layout: Layout) -> tuple:
            values, grads = value_and_grad(inputs, layout)
            total, count = update.unscaled(values)
            return total, count, grads

        def add(pending: tuple, inputs: Inputs, layout: Layout) -> tuple:
            total, count, grads = gather(inputs, layout)
            return total, pending[0] + count, tree_map(mx.add, pending[1], grads)

        # an update of one batch; its loss and norm are not evaluated yet
        self.whole = self._compiled(whole)
        self._gather = self._compiled(gather)
        self._add = self._compiled(add)
        self._update = update.apply
        if self._compiles:
            self._update = mx.compile(update.apply, inputs=self.state, outputs=self.state)

    def _compiled(self, step: Callable) -> Callable:
        def counted(*args: object) -> tuple:
            self.traces += is_traced(mx.random.state[0])
            return step(*args)

        if not self._compiles:
            return counted
        return mx.compile(counted, inputs=self.state, outputs=self.state)

    def __call__(self, batch: Batch, last: bool, alone: bool) -> tuple[float, float]:
        """Take a step; return the mean loss of the batch, and the norm of its update or 0."""
        return self.start(batch, last, alone).read()

    def start(self, batch: Batch, last: bool, alone: bool) -> StartedStep:
        """Let MLX take a step on a prepared batch; unless steps run ahead, it is over.

        The update comes with the ``last`` of an accumulation; where every update is of one batch
        (``alone``), all is one compiled function.
        """
        inputs = self.arrays(batch)
        if alone:
            loss, norm = self.whole(inputs, batch.layout)
            self._evaluate(self.state, loss, norm)
            return StartedStep(loss, 1, norm)

        if self.waiting:
            total, *pending = self._add(self._pending, inputs, batch.layout)
        else:
            total, *pending = self._gather(inputs, batch.layout)

        self.waiting += 1
        self._pending = tuple(pending)
        if group().is_alone or not last:  # else parts of the gradient are sent as they come
            self._evaluate(self._pending, total, mx.random.state)

        norm = self._update_waiting() if last else None
        return StartedStep(total, batch.denominator, norm)

    def arrays(self, batch: Batch) -> dict[str, mx.array]:
        """Return the arrays of a batch, whose shapes are noted."""
        inputs = arrays_of(batch)
        self.shapes.add((*(values.shape for values in inputs.values()), batch.layout))
        return inputs

    def start_pieces(self, pieces: Sequence[Batch], last: bool) -> StartedStep:
        """Start the step on the pieces of a batch, as `start`; each waits for the one before."""
        if len(pieces) > 1:
            self.wait_for_each()

        total = mx.zeros(())
        count = 0
        for number, piece in enumerate(pieces, 1):
            step = self.start(piece, last and number == len(pieces), alone=False)
            total = total + step.loss
            count += piece.denominator

        return StartedStep(total, count, step.norm)

    def start_together(
        self, batches: Sequence[Sequence[Batch]], together: Together
    ) -> list[StartedStep]:
        """Start an update on the pieces of its batches, which are computed ``together``."""
        pieces = [(self.arrays(piece), piece.layout) for batch in batches for piece in batch]

        def joint_loss() -> tuple:
            values = together([partial(self.loss, *piece) for piece in pieces])
            return sum(of_piece[0] for of_piece in values), values

        (_, values), grads = nn.value_and_grad(self.model, joint_loss)()
        sums = [self.update.unscaled(of_piece) for of_piece in values]
        self.waiting = len(pieces)
        self._pending = sum(count for _, count in sums), grads
        self._evaluate(self._pending, sums, mx.random.state)
        norm = self._update_waiting()

        steps = []
        totals = iter([total for total, _ in sums])
        for batch in batches:
            total = sum(next(totals) for _ in batch)
            steps.append(StartedStep(total, sum(piece.denominator for piece in batch), None))
        return [*steps[:-1], replace(steps[-1], norm=norm)]

    def start_without_batch(self, last: bool) -> StartedStep:
        """Take part in an update of the ranks without a batch of this one."""
        if not self.waiting:
            zeros = tree_map(mx.zeros_like, self.model.trainable_parameters())
            self._pending = mx.zeros(()), zeros
        self.waiting += 1

        norm = self._update_waiting() if last else None
        return StartedStep(mx.zeros(()), 0, norm)

    @contextmanager
    def random_of_rank(self) -> Iterator[None]:
        """Draw random numbers of the own rank in a step; after it all ranks have the same state."""
        ranks = group()
        state = mx.random.state[0]
        *of_ranks, following = mx.random.split(state, ranks.size + 1, stream=mx.cpu)
        set_random_state(of_ranks[ranks.rank])
        yield
        set_random_state(following)

    def wait_for_each(self) -> None:
        """Take one step at a time from now on, so that only one is in memory."""
        self.ahead = 0
        self._evaluate = mx.eval

    def flush(self) -> float:
        """Make the update of the gradients that wait, and return their norm."""
        return self._update_waiting().item()

    def _update_waiting(self) -> mx.array:
        count, grads = self._pending
        grads, count = summed_over_ranks(grads, count, self._exchange_dtype)
        norm = self._update(grads, count)
        self.waiting = 0
        self._pending = ()
        self._evaluate(self.state, norm)
        return norm


def runs_ahead() -> bool:
    """Whether MLX is given a step before the last one is over; the cores of a CPU are busy."""
    return not runtime.on_cpu()


def not_finite(loss: float, norm: float) -> str | None:
    """Return the fault of a step's result; None if loss and gradient norm are finite."""
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    if not math.isfinite(norm):
        return "the gradient is not finite"
    return None


@dataclass
class BatchStep:
    """The steps of a phase on whole batches.

    The update is the same up to rounding, with less in memory at a time. Dropout draws other masks,
    as the shapes it draws for are other ones.
    """

    stepper: Stepper  # on the arrays of a piece
    objective: Objective
    collate: Collate  # which knows the pieces of a batch
    parts: int = 1  # pieces of a batch; it only grows
    together: Together | None = None  # how batches of an update are computed; None: one by one

    def start(self, batch: Batch, last: bool, alone: bool) -> StartedStep:
        """Start the step on a prepared batch, as `Stepper.start`, one piece after the other."""
        if group().batch_shares > 1:
            return self._start_share(batch, last)

        pieces = self._pieces(batch)
        if len(pieces) == 1:
            return self.stepper.start(pieces[0], last, alone)
        if self.together:
            return self.stepper.start_together([pieces], self.together)[0]
        return self.stepper.start_pieces(pieces, last)

    def start_together(self, batches: Sequence[Batch]) -> list[StartedStep]:
        """Start the step on all prepared batches of an update."""
        pieces = [self._pieces(batch) for batch in batches]
        return self.stepper.start_together(pieces, self.together)

    def use_smaller_pieces(self, batch: Batch) -> bool:
        """Take batches in twice as many pieces; return whether ``batch`` can be cut so small."""
        # the ranks of a pipeline take the same pieces
        if group().batch_shares < group().size:
            return False
        if len(self._split(batch, 2 * self.parts)) <= len(self._split(batch, self.parts)):
            return False

        self.parts *= 2
        return True

    def first_piece(self, batch: Batch) -> Batch:
        """Return a part of a batch that is no larger than what is computed at a time."""
        parts = self.parts * group().batch_shares
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
