"""A step of several packs in one batch, laid out and never evaluated, as `our_step` lays out one."""

from pathlib import Path

import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_packs.adapters.attach import attach
from mlx_packs.config.schema import LoRAConfig, TrainConfig
from mlx_packs.data.dataset import Batch
from mlx_packs.nn.joint_lora import copied
from mlx_packs.objectives.causal_lm import CausalLM, possible_heads
from mlx_packs.optim import make_optimizer
from mlx_packs.packs.base import Base
from mlx_packs.runtime import mx
from mlx_packs.training.joint_step import JointStepper
from mlx_packs.training.step import BatchStep, DueStep, Stepper

from .capture import StepJob
from .our_step import _unchecked_kernels


def lazy_step(model: nn.Module, args: dict, job: StepJob) -> tuple[list[mx.array], list[mx.array]]:
    """Call one compiled step of ``job.packs`` packs; arguments and results as of `our_step`."""
    replacements: dict = {}
    due = [_due(copied(model), args, job, replacements) for _ in range(job.packs)]
    joint = JointStepper(due[0])
    steppers = [each.step.stepper for each in due]
    names = ("positions", "targets", "owners")
    own = [
        {
            "tokens": mx.zeros((job.batch, job.length), mx.int32),
            **{name: mx.zeros((job.targets,), mx.int32) for name in names},
        }
        for _ in due
    ]
    shared = {"tokens": mx.zeros((job.packs * job.batch, job.length), mx.int32)}

    models = [stepper.model for stepper in steppers]
    optimizers = [stepper.optimizer.state for stepper in steppers]
    state = [[each.parameters() for each in models], optimizers, mx.random.state[0]]
    leaves = {id(array): array for _, array in tree_flatten([state, shared, own])}
    with _unchecked_kernels():
        results = joint.whole(steppers, shared, own)

    trained = [each.trainable_parameters() for each in models]
    updated = [trained, [stepper.optimizer.state for stepper in steppers], results]
    return [array for _, array in tree_flatten(updated)], list(leaves.values())


def _due(model: nn.Module, args: dict, job: StepJob, replacements: dict) -> DueStep:
    base = Base("captured", Path("."), model, None, args, "", shared=replacements)
    attached = attach(base, LoRAConfig(rank=job.rank), matmul_path=job.path)
    attached.recompute(job.recompute)
    model.train()
    settings = TrainConfig()
    optimizer = make_optimizer(settings)
    optimizer.init(model.trainable_parameters())
    objective = CausalLM(model, next(possible_heads(model)))
    stepper = Stepper(model, objective.loss, optimizer, settings.max_grad_norm)
    batch = Batch({}, 0, 0)
    return DueStep(BatchStep(stepper, objective, None), batch, last=True, alone=True)
