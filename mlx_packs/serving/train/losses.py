"""Losses of the Tinker protocol, by name.

Each is a sum of one term for each target of each datum; p is the probability that the model gives
the target, q the one that it had when it was sampled (the input ``logprobs``), A its advantage.
Definitions: https://tinker-docs.thinkingmachines.ai/tinker/losses
Thresholds of ppo and cispo: tutorials/202_loss_functions.py of
https://github.com/thinking-machines-lab/tinker-cookbook, at 9dfcc3a.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import mlx.core as mx

from ...errors import PackError, did_you_mean

Inputs = Mapping[str, mx.array]  # [M] by name, one number for each target
_PPO_CLIP = (0.8, 1.2)
_CISPO_MAX = 4.0


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

    raise PackError(
        f"loss_fn: '{name:.40}' is not supported here. {did_you_mean(name, list(LOSSES))}",
        "unknown",
        "loss_fn",
    )
