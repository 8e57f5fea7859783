"""Losses of the Tinker protocol by name, and the forward passes that compute them.

Each loss is a sum of one term for each target of each datum; p is the probability that the model
gives the target, q the one that it had when it was sampled (the input ``logprobs``), A its
advantage.
Definitions: https://tinker-docs.thinkingmachines.ai/tinker/losses
Thresholds of ppo and cispo: tutorials/202_loss_functions.py of
https://github.com/thinking-machines-lab/tinker-cookbook, at 9dfcc3a.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from ...errors import PackError, did_you_mean
from ...objectives.causal_lm import Head, forward, part_of
from ...ops import linear_cross_entropy as head_ops
from ..fields import field_error

Grads = dict[str, mx.array]  # by the names of the parameters
Inputs = Mapping[str, mx.array]  # [M] by name, one number for each target
_PPO_CLIP = (0.8, 1.2)
_CISPO_MAX = 4.0
_MULTIPLE = 8  # rows are padded to a length that it divides
_SMALL = 256  # inputs of a pass in which padding takes little time
_LEAST_USED = 0.75  # of the inputs of a larger pass; the others are padding


@dataclass(frozen=True)
class Loss:
    """A loss.

    Attributes:
        terms: maps log p [M] and the inputs to the term [M] of each target.
        inputs: arrays that a datum must have, in addition to ``target_tokens``.
        optional: arrays that are ones unless a datum has them.
    """

    terms: Callable[[mx.array, Inputs], mx.array]
    inputs: tuple[str, ...] = ("logprobs", "advantages")
    optional: tuple[str, ...] = ()


def cross_entropy(logprobs: mx.array, inputs: Inputs) -> mx.array:
    """Return -w log p."""
    return -logprobs * inputs["weights"]


def importance_sampling(logprobs: mx.array, inputs: Inputs) -> mx.array:
    """Return -(p / q) A."""
    return -_ratio(logprobs, inputs) * inputs["advantages"]


def ppo(logprobs: mx.array, inputs: Inputs) -> mx.array:
    """Return -min(r A, clip(r) A) with r = p / q, as PPO: https://arxiv.org/abs/1707.06347."""
    low, high = _PPO_CLIP
    advantages = inputs["advantages"]
    ratio = _ratio(logprobs, inputs)
    clipped = mx.minimum(mx.maximum(ratio, low), high)
    return -mx.minimum(ratio * advantages, clipped * advantages)


def cispo(logprobs: mx.array, inputs: Inputs) -> mx.array:
    """Return -sg(min(p / q, 4)) A log p, as CISPO: https://arxiv.org/abs/2506.13585."""
    ratio = mx.stop_gradient(mx.minimum(_ratio(logprobs, inputs), _CISPO_MAX))
    return -ratio * logprobs * inputs["advantages"]


def _ratio(logprobs: mx.array, inputs: Inputs) -> mx.array:
    """Return p / q of each target."""
    return mx.exp(logprobs - inputs["logprobs"])


LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss(cross_entropy, (), ("weights",)),
    "importance_sampling": Loss(importance_sampling),
    "ppo": Loss(ppo),
    "cispo": Loss(cispo),
}


def find_loss(name: str) -> Loss:
    if (loss := LOSSES.get(name)) is not None:
        return loss

    hint = did_you_mean(name, list(LOSSES))
    raise field_error("loss_fn", f"'{name:.40}' is not supported here. {hint}", "unknown")


@dataclass(frozen=True)
class Datum:
    """A datum that was checked.

    Attributes:
        tokens: [T] int32.
        targets: [T] int32.
        inputs: of the loss, [T] float32 by name.
    """

    tokens: np.ndarray
    targets: np.ndarray
    inputs: Mapping[str, np.ndarray]

    @property
    def size(self) -> int:
        return len(self.tokens)


def split_passes(rows: Sequence[Datum], most: int) -> list[list[int]]:
    """Return the numbers of the rows of each forward pass, the longest rows first.

    Padded to its longest row, a pass has at most ``most`` inputs, few of them padding; a row that
    is longer is a pass by itself.
    """
    passes: list[list[int]] = []
    longest = used = 0
    for number in sorted(range(len(rows)), key=lambda i: -rows[i].size):
        size = rows[number].size
        inputs = longest * (len(passes[-1]) + 1) if passes else size
        is_padded = used + size < _LEAST_USED * inputs and inputs > _SMALL
        if not passes or inputs > most or is_padded:
            passes.append([])
            longest = size
            used = 0
        passes[-1].append(number)
        used += size
    return passes


def _padded(rows: Sequence[Datum]) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens [B, T] int32, padded with 0, and the positions of the others among them.

    Positions are those in the flattened tokens, row by row.
    """
    width = -(-max(row.size for row in rows) // _MULTIPLE) * _MULTIPLE
    tokens = np.zeros((len(rows), width), np.int32)
    positions = []
    for i, row in enumerate(rows):
        tokens[i, : row.size] = row.tokens
        positions.append(i * width + np.arange(row.size))
    return tokens, np.concatenate(positions).astype(np.int32)


def compute(
    base: nn.Module, head: Head | None, rows: Sequence[Datum], loss: Loss, backward: bool
) -> tuple[float, list[np.ndarray], Grads | None]:
    """Compute a pass on a base that has the adapters of a model; ``head`` is the model's.

    Returns:
        The loss, log-probabilities of the targets of each row, and gradients if asked for.

    Raises:
        PackError: if the loss or its gradient is not finite.
    """
    before = base.trainable_parameters()
    tokens, positions = map(mx.array, _padded(rows))
    targets = mx.array(np.concatenate([row.targets for row in rows]))
    inputs = {
        name: mx.array(np.concatenate([row.inputs[name] for row in rows]))
        for name in rows[0].inputs
    }

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

    by_row = np.split(np.array(logprobs), np.cumsum([row.size for row in rows])[:-1])
    return float(value.item()), by_row, grads


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
        nll, _ = head_ops.linear_cross_entropy(states, targets, head.frozen, gradient=backward)
        return -nll

    logits = states if head is None else head.logits(states)
    return -head_ops.cross_entropy(logits, targets)


def _check_finite(loss: mx.array, grads: Grads | None) -> None:
    finite = mx.stack([mx.isfinite(array).all() for array in (loss, *(grads or {}).values())])
    if not finite.all().item():
        raise PackError(
            "The loss or its gradient is not finite, and nothing was added to the gradient. Check "
            "weights, advantages and logprobs of the datums. If they are right, the learning rate "
            "was too high: continue from a saved state.",
            "diverged",
        )
