"""The scale of a float16 loss, adjusted on the device (https://arxiv.org/abs/1710.03740).

Gradients of activations that float16 would round to zero are kept by a scaled loss; the update
divides by the scale. An update whose gradient overflows is skipped, and halves the scale; it doubles
after `GROWTH` updates without overflow. The state of the scale is part of the optimizer's, so that
checkpoints have it.

No scale helps a loss that overflows in the forward pass, or a gradient that overflows unscaled. The scale is 0 from then on, and every later update changes nothing, until the loop reads
the result of that batch and goes back to bfloat16.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.nn as nn
import mlx.optimizers as optimizers
from mlx.utils import tree_flatten, tree_map, tree_map_with_path

from ..objectives.objective import Loss
from ..runtime import mx

KEY = "loss_scale"  # in the state of an optimizer
FIRST, LEAST, LARGEST = 2.0**7, 1.0, 2.0**24
GROWTH = 100  # updates without overflow
_DECAYING = (optimizers.Adam, optimizers.AdamW, optimizers.Lion)  # moments by ``betas``


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
    """Return a loss times the scale, whose second value is that of ``loss`` itself.

    The count of a batch whose loss is not finite is nan, as are then sums of counts.
    """

    def scaled_loss(*batch: mx.array) -> tuple[mx.array, tuple[mx.array, mx.array]]:
        total, count = loss(*batch)
        count = mx.where(mx.isfinite(total), count, math.nan)
        return total * optimizer.state[KEY]["scale"], (total, count)

    return scaled_loss


def guarded_update(
    model: nn.Module,
    optimizer: optimizers.Optimizer,
    grads: dict,
    norm: mx.array,
    count: mx.array,
) -> mx.array:
    """Update a model and its scale, or skip the update; returns the norm.

    Args:
        model: has the trainable parameters.
        optimizer: has a scale.
        grads: unscaled.
        norm: of ``grads``.
        count: as of `scaled`.

    Returns:
        float32; ``inf`` where the update is skipped, nan where it and all later ones are.
    """
    finite = mx.isfinite(norm)
    scale = _next_scale(optimizer.state[KEY], finite, mx.isfinite(count))
    stopped = scale["scale"] == 0
    own, before = model.trainable_parameters(), dict(tree_flatten(optimizer.state))
    with _lasting_moments(optimizer, finite) as moments_last:
        updated = optimizer.apply_gradients(
            tree_map(lambda g: mx.where(finite, g, 0), grads), model
        )
    model.update(tree_map(lambda new, old: mx.where(finite, new, old), updated, own))

    def kept(name: str, new: mx.array) -> mx.array:
        if "." not in name:  # schedules count skipped updates too, as they count batches
            return mx.where(stopped, before[name], new)
        return new if moments_last else mx.where(finite, new, before[name])

    optimizer.state.update(tree_map_with_path(kept, optimizer.state))
    optimizer.state[KEY] = scale
    return mx.where(stopped, math.nan, mx.where(finite, norm, math.inf))


@contextmanager
def _lasting_moments(optimizer: optimizers.Optimizer, finite: mx.array) -> Iterator[bool]:
    """Let gradients of zero leave moments as they are unless ``finite``, where an optimizer can.

    Its decays are 1 then. To choose between old and new moments afterwards takes five more kernels
    for each parameter, because the update is no longer one.
    """
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
    """Return the state of the scale after an update."""
    scale, good = state["scale"], state["good"] + 1
    larger = mx.where(good == GROWTH, mx.minimum(2 * scale, LARGEST), scale)
    smaller = mx.where(forward_finite & (scale > LEAST), scale / 2, 0.0)
    return {
        "scale": mx.where(finite, larger, smaller),
        "good": mx.where(finite, good % GROWTH, 0),
        "skipped": state["skipped"] + ~finite,
    }
