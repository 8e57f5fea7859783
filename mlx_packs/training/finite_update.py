"""Updates that change nothing where the gradient is not finite (``--on-nan skip``)."""

import math

import mlx.nn as nn
import mlx.optimizers as optimizers
from mlx.utils import tree_flatten, tree_map, tree_map_with_path

from ..objectives.objective import Loss
from ..runtime import mx


def counted_where_finite(loss: Loss) -> Loss:
    """Return a loss whose count of a batch is nan where its sum is not finite."""

    def counted(*batch: mx.array) -> tuple[mx.array, mx.array]:
        total, count = loss(*batch)
        return total, mx.where(mx.isfinite(total), count, math.nan)

    return counted


def update_if_finite(
    model: nn.Module, optimizer: optimizers.Optimizer, grads: dict, norm: mx.array
) -> mx.array:
    """Update a model where ``norm``, that of the gradients, is finite; else nothing changes.

    It is decided on the device: nothing waits for the number. Returns ``norm``.
    """
    finite = mx.isfinite(norm)
    weights, state = model.trainable_parameters(), dict(tree_flatten(optimizer.state))
    optimizer.update(model, grads)
    updated = model.trainable_parameters()
    model.update(tree_map(lambda new, old: mx.where(finite, new, old), updated, weights))
    optimizer.state.update(
        tree_map_with_path(lambda name, new: mx.where(finite, new, state[name]), optimizer.state)
    )
    return norm
