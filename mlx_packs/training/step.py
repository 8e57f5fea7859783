"""One compiled training step, and the accumulation of several batches into one update.

Gradients are those of the *sum* over targets and are divided by their number once, at the update,
so that N small batches equal one large one whatever their lengths.
"""

import math
from collections.abc import Callable

import mlx.nn as nn
import mlx.optimizers as optimizers
from mlx.utils import tree_flatten, tree_map

from ..objectives.causal_lm import Arrays, Head, loss_sum
from ..runtime import is_traced, mx


class Stepper:
    """Compiled steps over batches of one run.

    shapes: of the batches so far.   traces: of the functions below that MLX has compiled.

    Args:
        loss: of the arrays of a batch, in the place of a language model's: the sum over its
            targets, and what the sum is divided by.
    """

    def __init__(
        self,
        model: nn.Module,
        head: Head | None,
        optimizer: optimizers.Optimizer,
        max_grad_norm: float | None,
        z_loss: float = 0.0,
        label_smoothing: float = 0.0,
        loss: Callable[..., tuple[mx.array, mx.array]] | None = None,
    ):
        self.optimizer = optimizer
        self.state = [model.state, optimizer.state, mx.random.state]
        self.shapes: set[tuple] = set()
        self.traces = 0
        self._pending: tuple | None = None

        def loss_of_targets(*batch):
            total = loss_sum(model, head, *batch, z_loss=z_loss, label_smoothing=label_smoothing)
            return total, batch[3].sum()  # of the weights

        value_and_grad = nn.value_and_grad(model, loss or loss_of_targets)

        def update(grads, count):
            """Mean gradient over ``count`` targets, clipped; its norm before clipping."""
            grads = tree_map(lambda g: g / count, grads)
            norm = mx.sqrt(sum(g.square().sum() for _, g in tree_flatten(grads)))
            if max_grad_norm:
                shrink = mx.minimum(max_grad_norm / (norm + 1e-6), 1.0)
                grads = tree_map(lambda g: g * shrink, grads)
            optimizer.update(model, grads)
            return norm

        def whole(*batch):
            (total, count), grads = value_and_grad(*batch)
            return total / count, update(grads, count)

        def gather(*batch):
            (total, count), grads = value_and_grad(*batch)
            return total, count, grads

        def add(pending, batch):
            total, count, grads = gather(*batch)
            return total, pending[0] + count, tree_map(mx.add, pending[1], grads)

        def compiled(step):
            def counted(*args):
                self.traces += is_traced(mx.random.state[0])
                return step(*args)

            return mx.compile(counted, inputs=self.state, outputs=self.state)

        self._whole, self._gather, self._add = map(compiled, (whole, gather, add))
        self._update = mx.compile(update, inputs=self.state, outputs=self.state)

    def __call__(self, batch: Arrays, count: int, last: bool, alone: bool) -> tuple[float, float]:
        """Learn from a batch; the update comes with the ``last`` of an accumulation.

        Batches of one update count by their targets, so N small batches equal one large one.
        Returns: mean loss of this batch and the gradient norm of the update (0 if none was made).
        """
        self.shapes.add(tuple(a.shape for a in batch))
        if alone:
            loss, norm = self._whole(*batch)
            mx.eval(self.state, loss, norm)
            return loss.item(), norm.item()
        if self._pending is None:
            total, *pending = self._gather(*batch)
        else:
            total, *pending = self._add(self._pending, batch)
        self._pending = tuple(pending)
        mx.eval(self._pending, total, mx.random.state)
        if not last:
            return total.item() / count, 0.0
        return total.item() / count, self.flush()

    def flush(self) -> float:
        """The update of what is pending; its gradient norm."""
        norm = self._update(self._pending[1], self._pending[0])
        self._pending = None
        mx.eval(self.state, norm)
        return norm.item()

    @property
    def pending(self) -> bool:
        """Whether gradients wait for the rest of their update."""
        return self._pending is not None


def not_finite(loss: float, norm: float) -> str | None:
    """What is wrong with the result of a step; None if loss and gradient norm are finite."""
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    return None if math.isfinite(norm) else "the gradient is not finite"
