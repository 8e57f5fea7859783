"""Losses of the Tinker protocol, by name.

Each is a sum of one term for each target of each datum; p is the probability that the model gives
the target, q the one that it had when it was sampled (the input ``logprobs``), A its advantage.
Definitions: https://tinker-docs.thinkingmachines.ai/tinker/losses
Thresholds of ppo and cispo: tutorials/202_loss_functions.py of
https://github.com/thinking-machines-lab/tinker-cookbook, at 9dfcc3a. No default of ``beta``, or of
the thresholds of gspo, is published; 0.05 is that of the example for dro.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ...errors import PackError, did_you_mean
from .protocol import MOST_NUMBER

_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
_CLIP_ABOVE = {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}


@dataclass(frozen=True)
class Targets:
    """The targets of a batch of datums.

    Attributes:
        logprobs: [M], log p.
        inputs: arrays [M] by name, and numbers where all targets have the same.
        owners: [M], number of the datum in the batch.
        count: datums of the batch.
    """

    logprobs: mx.array
    inputs: Mapping[str, mx.array | float]
    owners: mx.array
    count: int

    def ratio(self) -> mx.array:
        """Return p / q of each target."""
        return mx.exp(self.logprobs - self.inputs["logprobs"])

    def clipped(self, ratio: mx.array) -> mx.array:
        low = self.inputs["clip_low_threshold"]
        high = self.inputs["clip_high_threshold"]
        return mx.minimum(mx.maximum(ratio, low), high)


@dataclass(frozen=True)
class Loss:
    """A loss.

    Attributes:
        terms: the term [M] of each target.
        inputs: arrays that a datum must have, beside ``target_tokens``.
        settings: numbers of ``loss_fn_config`` with their defaults; without one (None) it must be
            given. A datum may have an array of the same name in its place.
        optional: arrays that are ones unless a datum has them.
    """

    terms: Callable[[Targets], mx.array]
    inputs: tuple[str, ...]
    settings: Mapping[str, float | None]
    optional: tuple[str, ...] = ()


def cross_entropy(targets: Targets) -> mx.array:
    """Return -w log p."""
    return -targets.logprobs * targets.inputs["weights"]


def importance_sampling(targets: Targets) -> mx.array:
    """Return -(p / q) A."""
    return -targets.ratio() * targets.inputs["advantages"]


def _smaller_gain(targets: Targets, ratio: mx.array) -> mx.array:
    advantages = targets.inputs["advantages"]
    return -mx.minimum(ratio * advantages, targets.clipped(ratio) * advantages)


def ppo(targets: Targets) -> mx.array:
    """Return -min(r A, clip(r) A) with r = p / q, as PPO: https://arxiv.org/abs/1707.06347."""
    return _smaller_gain(targets, targets.ratio())


def cispo(targets: Targets) -> mx.array:
    """Return -sg(clip(p / q)) A log p, as CISPO: https://arxiv.org/abs/2506.13585."""
    ratio = mx.stop_gradient(targets.clipped(targets.ratio()))
    return -ratio * targets.logprobs * targets.inputs["advantages"]


def dro(targets: Targets) -> mx.array:
    """Return -(A log p - beta / 2 (log p - log q)^2), as DRO: https://arxiv.org/abs/2405.19107."""
    distance = mx.square(targets.logprobs - targets.inputs["logprobs"])
    gain = targets.logprobs * targets.inputs["advantages"]
    return -(gain - 0.5 * targets.inputs["beta"] * distance)


def gspo(targets: Targets) -> mx.array:
    """Return as `ppo`, with r = s p / sg(p); s is the geometric mean of p / q over a datum's mask.

    GSPO-token: https://arxiv.org/abs/2507.18071
    """
    fixed = mx.stop_gradient(targets.logprobs)
    mask = mx.array(targets.inputs["sequence_ratio_mask"] != 0, mx.float32)

    distances = (fixed - targets.inputs["logprobs"]) * mask
    sums = mx.zeros(targets.count).at[targets.owners].add(distances)
    counts = mx.zeros(targets.count).at[targets.owners].add(mask)
    means = sums / mx.maximum(counts, 1)

    return _smaller_gain(targets, mx.exp(means[targets.owners] + targets.logprobs - fixed))


_SAMPLED = ("logprobs", "advantages")
LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss(cross_entropy, (), {}, ("weights",)),
    "importance_sampling": Loss(importance_sampling, _SAMPLED, {}),
    "ppo": Loss(ppo, _SAMPLED, _CLIP),
    "cispo": Loss(cispo, _SAMPLED, _CLIP_ABOVE),
    "dro": Loss(dro, _SAMPLED, {"beta": 0.05}),
    "gspo": Loss(gspo, (*_SAMPLED, "sequence_ratio_mask"), dict.fromkeys(_CLIP)),
}


def find_loss(name: str) -> Loss:
    if (loss := LOSSES.get(name)) is not None:
        return loss

    raise PackError(
        f"loss_fn: '{name:.40}' is not supported here. {did_you_mean(name, list(LOSSES))}",
        "unknown",
        "loss_fn",
    )


def settings_of(loss: Loss, given: Mapping[str, float | str]) -> dict[str, Any]:
    """Return the numbers of a loss: as given in ``loss_fn_config``, else its defaults."""
    for name, value in given.items():
        where = f"loss_fn_config.{name:.40}"
        if name not in loss.settings:
            raise PackError(f"{where}: is not a setting of this loss.", flag="loss_fn_config")

        if not isinstance(value, float) or not abs(value) <= MOST_NUMBER:
            text = f"{where}: must be a finite number of at most {MOST_NUMBER:g}."
            raise PackError(text, flag="loss_fn_config")

    return {**loss.settings, **given}
