"""How gradients become an update, on the device: mean, clipping, what is not finite.

Two things may leave an update out, and neither waits for a number: ``--on-nan skip``, and the scale
of a float16 loss (https://arxiv.org/abs/1710.03740). Gradients of activations that float16 would
round to zero are kept by a scaled loss; the update divides by the scale. An update whose gradient
overflows is skipped, and halves the scale; it doubles after `GROWTH` updates without overflow. The
state of the scale is part of the optimizer's, so that checkpoints have it.

No scale helps a loss that overflows in the forward pass, or a gradient that overflows unscaled. The
scale is 0 from then on, and every later update changes nothing, until the loop reads the result of
that batch and goes back to bfloat16.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import mlx.nn as nn
import mlx.optimizers as optimizers
from mlx.utils import tree_flatten, tree_map, tree_map_with_path

from .. import runtime
from ..data.dataset import Layout
from ..distributed.group import group
from ..objectives.objective import Inputs, Loss
from ..runtime import mx

KEY = "loss_scale"  # in the state of an optimizer
FIRST = 2.0**7  # scale of the loss
LEAST = 1.0
LARGEST = 2.0**24
GROWTH = 100  # updates without overflow
_DECAYING = (optimizers.Adam, optimizers.AdamW, optimizers.Lion)  # moments by ``betas``
_JOINED = 1 << 22  # numbers of gradients that are joined for their norm


class Update:
    """The update of a model by the sum of its gradients; the arguments are as of `step.Stepper`.

    With a scale of the loss, that decides what is skipped.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: optimizers.Optimizer,
        max_grad_norm: float | None,
        skips: bool,
    ) -> None:
        self.is_scaled = is_scaled(optimizer)
        self._model = model
        self._optimizer = optimizer
        self._max_grad_norm = max_grad_norm
        self._skips = skips and not self.is_scaled

    def guarded(self, loss: Loss) -> Loss:
        """Return the loss whose gradients this update takes: `scaled` if it has a scale."""
        if self.is_scaled:
            return scaled(loss, self._optimizer)
        if self._skips:
            return _counted_where_finite(loss)
        return loss

    def unscaled(self, values: tuple) -> tuple[mx.array, mx.array]:
        """Return the sum of the losses and its count, of the values of a `guarded` loss."""
        return values[1] if self.is_scaled else values

    def apply(self, grads: dict, count: mx.array) -> mx.array:
        """Update by the clipped mean gradient over ``count`` targets; return its norm, float32.

        The norm is taken before clipping, and is not finite if the update is skipped.
        """
        targets = count
        if self.is_scaled:
            count = count * self._optimizer.state[KEY]["scale"]

        # elsewhere one factor for mean and clipping would spare nothing, and change last bits
        if not runtime.COMPILES:
            grads = tree_map(lambda g: g / count, grads)
            count = 1
        norm = group().norm(_norm([g for _, g in tree_flatten(grads)])) / count
        factor = 1 / count
        if self._max_grad_norm:
            factor = factor * mx.minimum(self._max_grad_norm / (norm + 1e-6), 1.0)
        grads = tree_map(lambda g: g * factor, grads)

        if self.is_scaled:
            return _update_and_scale(self._model, self._optimizer, grads, norm, targets)
        if self._skips:
            return _update_if_finite(self._model, self._optimizer, grads, norm)
        self._optimizer.update(self._model, grads)
        return norm


def _norm(arrays: Sequence[mx.array]) -> mx.array:
    """Return the L2 norm of all numbers of some arrays, float32."""
    # Where steps are compiled, as on a GPU, the small arrays, hundreds, are joined to large ones.
    limit = _JOINED if runtime.COMPILES else 0
    parts: list[list[mx.array]] = [[]]
    for array in arrays:
        if sum(a.size for a in parts[-1]) + array.size > limit:
            parts.append([])
        parts[-1].append(array)

    joined = []
    for part in filter(None, parts):
        if len(part) == 1:
            joined.append(part[0])
        else:
            joined.append(mx.concatenate([a.reshape(-1) for a in part]))

    return mx.sqrt(sum(numbers.square().sum() for numbers in joined))


def _counted_where_finite(loss: Loss) -> Loss:
    """Return a loss whose count of a batch is nan if its sum is not finite."""

    def counted(inputs: Inputs, layout: Layout) -> tuple[mx.array, mx.array]:
        total, count = loss(inputs, layout)
        return total, mx.where(mx.isfinite(total), count, math.nan)

    return counted


def _update_if_finite(
    model: nn.Module, optimizer: optimizers.Optimizer, grads: dict, norm: mx.array
) -> mx.array:
    """Update a model if ``norm``, the norm of the gradients, is finite; else nothing changes."""
    finite = mx.isfinite(norm)
    weights = model.trainable_parameters()
    state = dict(tree_flatten(optimizer.state))

    optimizer.update(model, grads)
    updated = model.trainable_parameters()
    model.update(tree_map(lambda new, old: mx.where(finite, new, old), updated, weights))
    optimizer.state.update(
        tree_map_with_path(lambda name, new: mx.where(finite, new, state[name]), optimizer.state)
    )
    return norm


def add_scale(optimizer: optimizers.Optimizer) -> None:
    """Let steps with an optimizer scale their loss."""
    optimizer.state[KEY] = {"scale": mx.array(FIRST), "good": mx.array(0), "skipped": mx.array(0)}


def remove_scale(optimizer: optimizers.Optimizer) -> None:
    """Let steps with an optimizer take their loss as it is."""
    optimizer.state.pop(KEY, None)


def is_scaled(optimizer: optimizers.Optimizer) -> bool:
    """Return whether steps with an optimizer scale their loss."""
    return KEY in optimizer.state


def scale_facts(optimizer: optimizers.Optimizer) -> dict[str, float]:
    """Return the scale, and the number of updates that it has skipped; evaluates both."""
    state = optimizer.state[KEY]
    return {"loss_scale": state["scale"].item(), "skipped_updates": state["skipped"].item()}


def scaled(loss: Loss, optimizer: optimizers.Optimizer) -> Loss:
    """Return a loss times the scale, whose second value is the result of ``loss`` itself.

    The count of a batch whose loss is not finite is nan, as are then sums of counts.
    """

    def scaled_loss(inputs: Inputs, layout: Layout) -> tuple[mx.array, tuple[mx.array, mx.array]]:
        total, count = loss(inputs, layout)
        count = mx.where(mx.isfinite(total), count, math.nan)
        return total * optimizer.state[KEY]["scale"], (total, count)

    return scaled_loss


def _update_and_scale(
    model: nn.Module,
    optimizer: optimizers.Optimizer,
    grads: dict,
    norm: mx.array,
    count: mx.array,
) -> mx.array:
    """Update a model and its scale, or skip the update, given unscaled gradients and their norm.

    Returns the norm: ``inf`` if the update is skipped, nan if it and all later ones are.
    ``count`` is the count of `scaled`.
    """
    finite = mx.isfinite(norm)
    scale = _next_scale(optimizer.state[KEY], finite, mx.isfinite(count))
    stopped = scale["scale"] == 0

    parameters = model.trainable_parameters()
    before = dict(tree_flatten(optimizer.state))
    with _lasting_moments(optimizer, finite) as moments_last:
        updated = optimizer.apply_gradients(
            tree_map(lambda g: mx.where(finite, g, 0), grads), model
        )
    model.update(tree_map(lambda new, old: mx.where(finite, new, old), updated, parameters))

    def kept(name: str, new: mx.array) -> mx.array:
        if "." not in name:  # schedules count skipped updates too, as they count batches
            return mx.where(stopped, before[name], new)
        if moments_last:
            return new
        return mx.where(finite, new, before[name])

    optimizer.state.update(tree_map_with_path(kept, optimizer.state))
    optimizer.state[KEY] = scale
    return mx.where(stopped, math.nan, mx.where(finite, norm, math.inf))


@contextmanager
def _lasting_moments(optimizer: optimizers.Optimizer, finite: mx.array) -> Iterator[bool]:
    """Let gradients of zero leave moments as they are unless ``finite``, if an optimizer can."""
    # Its decays are 1 then. To choose between old and new moments afterwards takes five more
    # kernels for each parameter, because the update is no longer one.
    if type(optimizer) not in _DECAYING:
        yield False
        return

    betas = optimizer.betas
    optimizer.betas = [mx.where(finite, beta, 1.0) for beta in betas]
    try:
        yield True
    finally:
        optimizer.betas = betas


def _next_scale(
    state: dict[str, mx.array], finite: mx.array, forward_finite: mx.array
) -> dict[str, mx.array]:
    scale = state["scale"]
    good = state["good"] + 1
    larger = mx.where(good == GROWTH, mx.minimum(2 * scale, LARGEST), scale)
    smaller = mx.where(forward_finite & (scale > LEAST), scale / 2, 0.0)
    return {
        "scale": mx.where(finite, larger, smaller),
        "good": mx.where(finite, good % GROWTH, 0),
        "skipped": state["skipped"] + ~finite,
    }
