"""Steps of a causal language model, without a run around them."""

import mlx.nn as nn
import mlx.optimizers as optimizers

from mlx_packs.objectives.causal_lm import Head, loss_sum, split_head
from mlx_packs.runtime import mx
from mlx_packs.training.step import Stepper


def lm_stepper(
    model: nn.Module,
    optimizer: optimizers.Optimizer,
    max_grad_norm: float | None = 1.0,
    head: Head | None = None,
) -> Stepper:
    """A stepper on the loss of the next token; by default the model is split into states and head."""
    head = head or split_head(model)

    def loss(*arrays: mx.array) -> tuple[mx.array, mx.array]:
        return loss_sum(model, head, *arrays), arrays[3].sum()  # of the weights

    return Stepper(model, loss, optimizer, max_grad_norm)
