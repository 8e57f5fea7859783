"""One step of several runs over one frozen base: each row of a batch goes through its own pack.

Each run has a model of its own, with the same frozen modules; a step computes the states of all
their batches in one pass, and of these each run its loss, its gradient and its update. Rows are
padded at their ends to the longest of all, which no input before sees.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import mlx.nn as nn
import numpy as np

from ..adapters.attach import adapted_paths
from ..config.lora import LoRAConfig
from ..data.batches import PADDING, padded
from ..data.dataset import Batch
from ..errors import PackError
from ..nn.joint_lora import JointLoRA, joint_model
from ..nn.lora import EmbeddingLoRA, GroupedLoRA
from ..nn.segments import segment_numbers
from ..objectives.causal_lm import forward, part_of, segments_of
from ..packs.base import Base
from ..runtime import mx
from .step import DueStep, JointTime, StartedStep, Stepper, runs_ahead

_READ = {"tokens", "positions", "targets", "owners", "segments", "labels", "reference"}
Arrays = dict[str, mx.array]
Values = list[tuple[mx.array, mx.array]]  # of each run its sum of losses, and their number
Group = TypeVar("Group", bound=GroupedLoRA)


class JointStepper:
    """Compiled steps of several runs; ``first`` is a step of one of them.

    The runs train adapters of the same modules; ranks, scales and learning rates may differ.
    """

    def __init__(self, first: DueStep) -> None:
        model = first.step.stepper.model
        head = first.step.objective.head
        self._model, copies = joint_model(model)
        self._part = self._model
        if head is not None:
            self._part = copies[id(part_of(model, head))]
        self._model.train()

        self._groups = _groups(self._model, JointLoRA)
        self._compiled: dict[tuple, Callable] = {}
        self._evaluate = mx.async_eval if runs_ahead() else mx.eval

    def start(self, due: Sequence[DueStep]) -> list[StartedStep]:
        """Let MLX take a step of every run in ``due``; return what became of each."""
        for each in due:
            check_batch(each.batch)

        joint = JointTime()
        steppers = [each.step.stepper for each in due]
        batches = with_same_shapes([each.batch for each in due])
        own = [stepper.arrays(each) for stepper, each in zip(steppers, batches, strict=True)]
        shared = joined_rows(batches)

        if all(each.alone for each in due):
            losses, norms = self.whole(steppers, shared, own)
            self._evaluate([stepper.state for stepper in steppers], losses, norms)

            pairs = zip(losses, norms, strict=True)
            return [StartedStep(loss, 1, norm, joint) for loss, norm in pairs]

        values, grads = self._function(self._gather, steppers)(shared, own)
        self._evaluate(values, grads)
        started = [
            each.step.stepper.take_gradients(total, (count, grad), each.batch, each.last)
            for each, (total, count), grad in zip(due, values, grads, strict=True)
        ]
        return [replace(each, joint=joint) for each in started]

    def whole(
        self, steppers: Sequence[Stepper], shared: Arrays, own: Sequence[Arrays]
    ) -> tuple[list[mx.array], list[mx.array]]:
        """Update every run, by one compiled function; return mean losses, and gradient norms.

        ``shared`` is from `joined_rows`, ``own`` are the arrays of each run's batch. Nothing is
        evaluated yet.
        """
        return self._function(self._whole, steppers)(shared, own)

    def _function(self, step: Callable, steppers: Sequence[Stepper]) -> Callable:
        key = (step.__name__, *map(id, steppers))
        if key not in self._compiled:
            state = [stepper.state for stepper in steppers]
            self._compiled[key] = mx.compile(partial(step, steppers), inputs=state, outputs=state)
        return self._compiled[key]

    def _whole(
        self, steppers: Sequence[Stepper], shared: Arrays, own: Sequence[Arrays]
    ) -> tuple[list[mx.array], list[mx.array]]:
        values, grads = self._gather(steppers, shared, own)
        losses = [total / count for total, count in values]
        norms = [
            stepper.update.apply(grad, count)
            for stepper, grad, (_, count) in zip(steppers, grads, values, strict=True)
        ]
        return losses, norms

    def _gather(
        self, steppers: Sequence[Stepper], shared: Arrays, own: Sequence[Arrays]
    ) -> tuple[Values, list[dict]]:
        """Return losses with their counts, and gradients, of every run."""

        def loss(parameters: list[dict]) -> tuple[mx.array, Values]:
            _set(steppers, parameters)
            states = self._states(steppers, shared)
            values = []
            of_runs = mx.split(states, len(steppers))
            for stepper, inputs, rows in zip(steppers, own, of_runs, strict=True):
                known = {**inputs, "target_states": _of_targets(rows, inputs)}
                values.append(stepper.loss(known, ()))

            # with a scale the second value has the unscaled sum and its count
            unscaled = [
                value[1] if stepper.scaled else value
                for stepper, value in zip(steppers, values, strict=True)
            ]
            return sum(total for total, _ in values), unscaled

        parameters = [stepper.model.trainable_parameters() for stepper in steppers]
        (_, values), grads = mx.value_and_grad(loss)(parameters)

        _set(steppers, parameters)
        for group in self._groups.values():
            group.clear()
        return values, grads

    def _states(self, steppers: Sequence[Stepper], shared: Arrays) -> mx.array:
        """Return the states [P B, T, D] of the rows of all runs."""
        packs = [_groups(stepper.model, GroupedLoRA) for stepper in steppers]
        for path, group in self._groups.items():
            group.stack([of_pack[path] for of_pack in packs])
        return forward(self._model, self._part, shared["tokens"], shared.get("segments"))


def check_batch(batch: Batch) -> None:
    if others := sorted(set(batch.inputs) - _READ):
        raise PackError(
            f"--seeds: several packs in one batch cannot train on {others[0]} yet. Train one pack "
            "at a time.",
            "unsupported",
            "seeds",
        )


def check_groups(model: nn.Module) -> None:
    """Raise a PackError if a model has adapters that packs in one batch cannot have."""
    for path, group in _groups(model, GroupedLoRA).items():
        if type(group) is not GroupedLoRA or any(a.ndim > 2 for a in group.lora_a):
            kind = "an embedding" if isinstance(group, EmbeddingLoRA) else "no plain linear layer"
            raise PackError(
                f"--seeds: {path} adapts {kind}, which several packs in one batch cannot. Leave it "
                "out of --target-modules, or train one pack at a time.",
                "unsupported",
                "seeds",
            )


def check_same_modules(base: Base, loras: Sequence[LoRAConfig], fp16_fallback: bool) -> None:
    """Raise a PackError if packs would adapt other modules, as where one is narrower than a rank.

    Nothing is attached, so that no run has to be evaluated first.
    """
    of_packs = [adapted_paths(base, lora, fp16_fallback) for lora in loras]
    common = set.intersection(*of_packs)

    if others := sorted(set.union(*of_packs) - common):
        raise PackError(
            f"--seeds: some packs adapt {others[0]} and others do not, since it is narrower than "
            "their rank. Name the layers by --target-modules, or train one pack at a time.",
            "unsupported",
            "seeds",
        )


def with_same_shapes(batches: Sequence[Batch]) -> list[Batch]:
    """Return batches with rows as long as the longest, and slots for the targets of the most.

    So a step is compiled for few shapes, as with one run; padding changes no sum.
    """
    width = max(batch.inputs["tokens"].shape[1] for batch in batches)
    slots = max(len(batch.inputs["positions"]) for batch in batches)
    return [_with_shape(batch, width, slots) for batch in batches]


def _with_shape(batch: Batch, width: int, slots: int) -> Batch:
    tokens = np.asarray(batch.inputs["tokens"])
    positions = np.asarray(batch.inputs["positions"])
    rows, own_width = tokens.shape
    inputs = {**batch.inputs, "positions": positions // own_width * width + positions % own_width}

    for name in ("tokens", "segments"):
        if name in inputs:
            inputs[name] = _filled(np.asarray(inputs[name]), rows, width)
    for name in PADDING:
        if name in inputs:
            inputs[name] = padded(np.asarray(inputs[name]), name, slots)
    return replace(batch, inputs=inputs)


def joined_rows(batches: Sequence[Batch]) -> Arrays:
    """Return the tokens [P B, T] of P batches, and their segments if they are packed.

    Each batch is padded to the most rows, and the longest, of all.
    """
    tokens = [np.asarray(batch.inputs["tokens"]) for batch in batches]
    rows = max(len(each) for each in tokens)
    width = max(each.shape[1] for each in tokens)
    joined = {"tokens": mx.array(np.concatenate([_filled(t, rows, width) for t in tokens]))}

    segments = [segments_of(batch.inputs, batch.layout) for batch in batches]
    if segments[0] is not None:
        numbers = [
            each if isinstance(each, np.ndarray) else np.array(segment_numbers(each))
            for each in segments
        ]
        numbers = [_filled(each, rows, width) for each in numbers]
        joined["segments"] = mx.array(np.concatenate(numbers))
    return joined


def _filled(values: np.ndarray, rows: int, width: int) -> np.ndarray:
    """Return [rows, width] of smaller values [B, T], each row with its last one at the end."""
    values = np.pad(values, ((0, 0), (0, width - values.shape[1])), mode="edge")
    return np.pad(values, ((0, rows - len(values)), (0, 0)))


def _of_targets(states: mx.array, inputs: Arrays) -> mx.array:
    """Return the states [M, D] of the targets of a run, of [B, T, D] with padding at the ends."""
    rows, width = inputs["tokens"].shape
    known = states[:rows, :width]

    return known.reshape(-1, known.shape[-1])[inputs["positions"]]


def _groups(model: nn.Module, kind: type[Group]) -> dict[str, Group]:
    return {path: m for path, m in model.named_modules() if isinstance(m, kind)}


def _set(steppers: Sequence[Stepper], parameters: Sequence[dict]) -> None:
    for stepper, own in zip(steppers, parameters, strict=True):
        stepper.model.update(own)
