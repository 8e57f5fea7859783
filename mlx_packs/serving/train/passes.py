"""A forward pass over rows of one model or of several, with the gradient of each.

The models share the base, which computes all rows at once: first those of one model, then those of
the next. Each row goes through the adapters of its own model, and each model has its own loss.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optimizers
import numpy as np
from mlx.utils import tree_flatten

from ...adapters.lora import Attached
from ...errors import PackError
from ...nn.joint_lora import split_rows
from ...nn.lora import GroupedLoRA
from ...objectives.causal_lm import Head, forward, part_of
from ...objectives.shared_prefix import why_length_matters
from .batches import RowBatch
from .logprobs import target_logprobs
from .losses import Loss, Targets

MOST_INPUTS = 2048  # inputs of one pass; 512 where all logits are in memory
_MOST_WITH_LOGITS = 512
_ROUNDING = 0.1  # of logits in half precision, and far below what a wrong mask does
Grads = dict[str, mx.array]  # by the names of the parameters
Modules = list[tuple[str, nn.Module]]  # by path
Factors = dict[str, dict]  # lora_a and lora_b of groups, by the path of each


@dataclass(frozen=True)
class Lifted:
    """Modules with adapters that are not on the base.

    Attributes:
        modules: what `replace_modules` puts on the base.
        originals: the base's own modules in their places, in the order of their replacement.
    """

    modules: Modules
    originals: Modules


@dataclass(eq=False)
class TrainedModel:
    """Adapters, the gradients that wait for an update, and the state of the optimizer.

    Attributes:
        groups: the adapters by the path of their module.
        grads: sum of the gradients since the last update; None without any.
        updates: the compiled update, by its settings.
    """

    attached: Attached
    lifted: Lifted
    groups: dict[str, GroupedLoRA]
    head: Head | None
    optimizer: optimizers.AdamW
    rank: int
    grads: Grads | None = None
    updates: dict[tuple, Callable[[dict], mx.array]] = field(default_factory=dict)

    @property
    def has_own_head(self) -> bool:
        """Whether its head is adapted; all logits of a pass are in memory then."""
        return self.head is not None and self.head.frozen is None

    @property
    def most_inputs(self) -> int:
        """The most inputs of a pass."""
        if self.head is None or self.has_own_head:
            return _MOST_WITH_LOGITS
        return MOST_INPUTS

    @property
    def factors(self) -> Factors:
        return {path: group.trainable_parameters() for path, group in self.groups.items()}

    def set(self, factors: Factors) -> None:
        for path, own in factors.items():
            self.groups[path].update(own)


def share_a_pass(one: TrainedModel, other: TrainedModel) -> bool:
    """Return whether one pass can compute rows of both models.

    Not where one has adapters of experts, among which rows are sorted, nor where both adapt a
    projection that one of them cuts into slices.
    """
    if one.has_own_head != other.has_own_head:
        return False

    specs = one.attached.specs
    others = other.attached.specs
    if any(spec.experts is not None for spec in (*specs.values(), *others.values())):
        return False
    return all(specs[path].widths == others[path].widths for path in specs if path in others)


def padding_matters(model: nn.Module) -> bool:
    """Return whether what a row begins with depends on padding at its end; computes two short rows.

    As with dynamic NTK, whose RoPE depends on the length of a row, or with a wrong mask.
    """
    if why_length_matters(model, MOST_INPUTS // 2) is not None:
        return True

    row = mx.array([[1, 2, 3, 1, 2, 3, 1, 2]])
    padded = mx.pad(row, ((0, 0), (0, row.size)))
    alone = model(row).astype(mx.float32).reshape(-1)
    beginning = model(padded)[:, : row.size].astype(mx.float32).reshape(-1)

    difference = mx.linalg.norm(beginning - alone) / mx.linalg.norm(alone)
    return not difference.item() <= _ROUNDING  # nan is none


@dataclass(frozen=True)
class Part:
    """Rows of one model in a pass; those of all parts have the same width."""

    model: TrainedModel
    batch: RowBatch
    loss: Loss


@dataclass(frozen=True)
class Pass:
    """What a pass made of a part: its loss, log-probabilities of each row, gradients or None."""

    loss: float
    logprobs: list[np.ndarray]
    grads: Grads | None


def compute(base: nn.Module, parts: Sequence[Part], backward: bool) -> list[Pass | PackError]:
    """Compute a pass on a base that has the adapters of all parts.

    Returns what became of each part: an error if its loss or its gradient is not finite, which
    those of the others are not affected by.
    """
    models = [part.model for part in parts]
    own = [model.factors for model in models]

    def total(factors: list[Factors]) -> tuple[mx.array, tuple[list[mx.array], list[mx.array]]]:
        for model, values in zip(models, factors, strict=True):
            model.set(values)
        logprobs = _logprobs(base, parts, backward)

        losses = []
        for part, values in zip(parts, logprobs, strict=True):
            batch = part.batch
            inputs = {name: mx.array(array) for name, array in batch.inputs.items()}
            owners = mx.array(batch.arrays["owners"])
            targets = Targets(values, inputs, owners, len(batch.numbers))
            losses.append(part.loss.terms(targets).sum())
        return sum(losses, mx.array(0.0)), (losses, logprobs)

    grads: list[Grads | None] = [None] * len(parts)
    try:
        if backward:
            (_, (losses, logprobs)), trees = mx.value_and_grad(total)(own)
            grads = [dict(tree_flatten(tree)) for tree in trees]
        else:
            _, (losses, logprobs) = total(own)
    finally:
        for model, values in zip(models, own, strict=True):
            model.set(values)

    mx.eval(losses, logprobs, grads)
    return [_result(*found) for found in zip(parts, losses, logprobs, grads, strict=True)]


def _logprobs(base: nn.Module, parts: Sequence[Part], backward: bool) -> list[mx.array]:
    """Return log p [M] of the targets of each part."""
    head = parts[0].model.head
    tokens = mx.array(np.concatenate([part.batch.arrays["tokens"] for part in parts]))
    states = forward(base, part_of(base, head), tokens)

    of_parts = [states]
    if len(parts) > 1:
        of_parts = split_rows(states, [len(part.batch.numbers) for part in parts])

    known = []
    for part, own in zip(parts, of_parts, strict=True):
        positions = mx.array(part.batch.arrays["positions"])
        known.append(own.reshape(-1, own.shape[-1])[positions])

    if parts[0].model.has_own_head:
        return [
            target_logprobs(part.model.head, own, part.batch.targets, backward)
            for part, own in zip(parts, known, strict=True)
        ]

    targets = [row for part in parts for row in part.batch.targets]
    logprobs = target_logprobs(head, mx.concatenate(known), targets, backward)
    ends = accumulate(len(part.batch.arrays["owners"]) for part in parts)
    return mx.split(logprobs, list(ends)[:-1])


def _result(
    part: Part, loss: mx.array, logprobs: mx.array, grads: Grads | None
) -> Pass | PackError:
    """Return what became of a part; an error if not all of it is finite."""
    finite = mx.stack([mx.isfinite(array).all() for array in (loss, *(grads or {}).values())])
    if not finite.all().item():
        return PackError(
            "The loss or its gradient is not finite, and nothing was added to the gradient. Check "
            "weights, advantages and logprobs of the datums. If they are right, the learning rate "
            "was too high: go on from a saved state.",
            "diverged",
        )

    targets = part.batch.targets
    rows = np.split(np.array(logprobs), np.cumsum([row.size for row in targets])[:-1])
    shaped = [values.reshape(row.shape) for values, row in zip(rows, targets, strict=True)]
    return Pass(float(loss.item()), shaped, grads)
