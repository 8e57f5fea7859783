"""A forward pass over rows of a model in training, with its gradient."""

from collections.abc import Callable
from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optimizers
import numpy as np
from mlx.utils import tree_flatten

from ...adapters.lora import Attached
from ...errors import PackError
from ...objectives.causal_lm import Head, forward, part_of
from ...ops.linear_cross_entropy import cross_entropy, linear_cross_entropy
from .batches import RowBatch
from .losses import Loss

MOST_INPUTS = 2048  # inputs of one pass; 512 where all logits are in memory
_MOST_WITH_LOGITS = 512
Grads = dict[str, mx.array]  # by the names of the parameters


@dataclass(eq=False)
class TrainedModel:
    """Adapters, the gradients that wait for an update, and the state of the optimizer.

    Attributes:
        modules: what `replace_modules` puts on the base for a pass or an update.
        grads: sum of the gradients since the last update; None without any.
        updates: the compiled update, by its settings.
    """

    attached: Attached
    modules: list[tuple[str, nn.Module]]
    head: Head | None
    optimizer: optimizers.AdamW
    rank: int
    grads: Grads | None = None
    updates: dict[tuple, Callable[[dict], mx.array]] = field(default_factory=dict)

    @property
    def most_inputs(self) -> int:
        if self.head is None or self.head.frozen is None:
            return _MOST_WITH_LOGITS
        return MOST_INPUTS


@dataclass(frozen=True)
class PassResult:
    """The loss of a pass, log-probabilities of the targets of each row, gradients or None."""

    loss: float
    logprobs: list[np.ndarray]
    grads: Grads | None


def compute(
    base: nn.Module, head: Head | None, batch: RowBatch, loss: Loss, backward: bool
) -> PassResult:
    """Compute a pass on a base that has the adapters of a model; ``head`` is the model's.

    Raises:
        PackError: if the loss or its gradient is not finite.
    """
    before = base.trainable_parameters()
    tokens, positions, targets = map(mx.array, (batch.tokens, batch.positions, batch.targets))
    inputs = {name: mx.array(array) for name, array in batch.inputs.items()}

    def total(parameters: dict) -> tuple[mx.array, mx.array]:
        base.update(parameters)
        states = forward(base, part_of(base, head), tokens)
        known = states.reshape(-1, states.shape[-1])[positions]
        logprobs = target_logprobs(head, known, targets, backward)
        return loss.terms(logprobs, inputs).sum(), logprobs

    grads = None
    try:
        if backward:
            (value, logprobs), tree = mx.value_and_grad(total)(before)
            grads = dict(tree_flatten(tree))
        else:
            value, logprobs = total(before)
    finally:
        base.update(before)

    mx.eval(value, logprobs, grads)
    _check_finite(value, grads)

    by_row = np.split(np.array(logprobs), np.cumsum(batch.sizes)[:-1])
    return PassResult(float(value.item()), by_row, grads)


def target_logprobs(
    head: Head | None, states: mx.array, targets: mx.array, backward: bool
) -> mx.array:
    """Return log p [N] float32 of targets [N].

    Args:
        head: reads the states; None if they are logits.
        states: [N, D]; without a head [N, V].
        targets: one for each state.
        backward: whether the gradient of ``states`` will be asked for.
    """
    if head is not None and head.frozen is not None:
        nll, _ = linear_cross_entropy(states, targets, head.frozen, gradient=backward)
        return -nll

    logits = states if head is None else head.logits(states)
    return -cross_entropy(logits, targets)


def _check_finite(loss: mx.array, grads: Grads | None) -> None:
    finite = mx.stack([mx.isfinite(array).all() for array in (loss, *(grads or {}).values())])
    if not finite.all().item():
        raise PackError(
            "The loss or its gradient is not finite, and nothing was added to the gradient. Check "
            "weights, advantages and logprobs of the datums. If they are right, the learning rate "
            "was too high: go on from a saved state.",
            "diverged",
        )
