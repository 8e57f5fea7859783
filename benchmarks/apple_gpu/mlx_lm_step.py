"""The step and the batches of stock mlx-lm: its own `train`, stopped once its step is laid out."""

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optimizers
from mlx.utils import tree_flatten
from mlx_lm.tuner import trainer
from mlx_lm.tuner.dora import DoRALinear
from mlx_lm.tuner.utils import linear_to_lora_layers

_SCALE, _LEARNING_RATE = 20.0, 1e-5


class _LaidOut(Exception):
    """The compiled step was called: ``outputs`` and ``leaves``."""

    def __init__(self, outputs: list[mx.array], leaves: list[mx.array]) -> None:
        super().__init__()
        self.outputs, self.leaves = outputs, leaves


def lazy_step(
    model: nn.Module, *, batch: int, length: int, rank: int, recompute: str, method: str = "lora"
) -> tuple[list[mx.array], list[mx.array]]:
    """As `our_step.lazy_step`, of mlx-lm.

    Every projection of every block has an adapter; every position reaches the head.

    Args:
        recompute: block is mlx-lm's ``--grad-checkpoint``.
        method: lora or dora.
    """
    config = {"rank": rank, "scale": _SCALE, "dropout": 0.0}
    linear_to_lora_layers(model, len(model.layers), config, use_dora=method == "dora")
    for module in model.modules():
        if isinstance(module, DoRALinear):  # which it computes once, from weights
            module.m = mx.zeros(module.m.shape)
    optimizer = optimizers.AdamW(learning_rate=_LEARNING_RATE)
    optimizer.init(model.trainable_parameters())
    options = trainer.TrainingArgs(
        batch_size=batch, iters=1, max_seq_length=length + 1, grad_checkpoint=recompute == "block"
    )
    compile_, block = mx.compile, type(model.layers[0])
    forward = block.__call__  # grad_checkpoint replaces it

    def arrays(tree: object) -> list[mx.array]:
        return [a for _, a in tree_flatten(tree) if isinstance(a, mx.array)]

    def stopped(step, inputs, outputs):
        compiled = compile_(step, inputs=inputs, outputs=outputs)

        def called(*batch):
            leaves = arrays([inputs, batch])
            results = compiled(*batch)
            raise _LaidOut(arrays([outputs, results]), leaves)

        return called

    mx.compile = stopped
    try:
        trainer.train(model, optimizer, [([0] * (length + 1), 0)] * batch, args=options)
    except _LaidOut as step:
        return step.outputs, step.leaves
    finally:
        mx.compile, block.__call__ = compile_, forward
    raise RuntimeError("mlx-lm's train() called no compiled step")


def batch_shapes(
    lengths: Sequence[int], batch_size: int, max_length: int
) -> list[tuple[int, int, int]]:
    """As `our_step.batch_shapes`, of mlx-lm, whose targets are all positions."""
    rows = [([0] * length, 0) for length in lengths]
    batches = trainer.iterate_batches(rows, batch_size, max_length)
    shapes = [(tokens.shape[0], tokens.shape[1] - 1) for tokens, _ in batches]
    return [(sequences, inputs, sequences * inputs) for sequences, inputs in shapes]
