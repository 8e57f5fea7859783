"""Steps of clients of `packs serve --train`, laid out and never evaluated, as `our_step` does.

The trainer of the server computes them: one pass over the rows of all clients, and an update of
each client's model. Where it would read a number, it gets one.
"""

from pathlib import Path
from unittest import mock

import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from mlx_packs.objectives.causal_lm import possible_heads
from mlx_packs.packs.base import Base
from mlx_packs.runtime import mx
from mlx_packs.serving.slots import PackSlots
from mlx_packs.serving.train import passes, trainer
from mlx_packs.serving.train.batches import Row, batch_of
from mlx_packs.serving.train.losses import LOSSES
from mlx_packs.serving.train.passes import Part, Pass
from mlx_packs.training.update import Update

from .capture import StepJob
from .our_step import _unchecked_kernels

_STEP = trainer.AdamStep(1e-4, (0.9, 0.95), 1e-8, 0.0, 1.0)


def lazy_step(model: nn.Module, args: dict, job: StepJob) -> tuple[list[mx.array], list[mx.array]]:
    """Lay out a step of ``job.packs`` clients; arguments and results as of `our_step`."""
    norms: list[mx.array] = []

    class Unread(Update):
        def apply(self, grads: dict, count: mx.array) -> mx.array:
            norms.append(super().apply(grads, count))
            return mx.array(1.0)

    def unread(part: Part, loss: mx.array, logprobs: mx.array, grads: dict) -> Pass:
        norms.extend((loss, logprobs))
        return Pass(0.0, [], grads)

    def first_head(model: nn.Module) -> object:
        return next(possible_heads(model))

    with (
        mock.patch.object(trainer, "split_head", first_head),
        mock.patch.object(trainer, "Update", Unread),
        mock.patch.object(passes, "_result", unread),
        _unchecked_kernels(),
    ):
        served = trainer.Trainer(PackSlots(Base("captured", Path("."), model, None, args, "")))
        parts = [_part(served, job, seed) for seed in range(job.packs)]
        state = [[model.parameters(), mx.random.state[0]], *map(_state, parts)]
        leaves = {id(array): array for _, array in tree_flatten(state)}

        for part, done in zip(parts, served.run(parts, backward=True), strict=True):
            served.add(part.model, done.grads)
            served.update(part.model, _STEP)

    results = [norms, *map(_state, parts)]
    return [array for _, array in tree_flatten(results)], list(leaves.values())


def _part(served: trainer.Trainer, job: StepJob, seed: int) -> Part:
    model = served.create(trainer.Adapters(job.rank, seed))
    tokens = np.zeros(job.length, np.int32)
    row = Row(tokens, tokens, {"weights": 1.0})
    batch = batch_of([row] * job.batch, range(job.batch), job.length)
    return Part(model, batch, LOSSES["cross_entropy"])


def _state(part: Part) -> list:
    return [part.model.factors, part.model.optimizer.state]
