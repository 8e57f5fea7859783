"""Learning-rate schedules by name: what the rate does after the warm-up.

A schedule is one function here, registered in `SCHEDULES`; configuration, help and training read
the registry. MLX is imported inside the functions, so that reading a configuration does not load
it.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import mlx.core as mx

    Schedule = Callable[[mx.array], mx.array]

WSD_DECAY = 0.2  # share of the updates in which `wsd` decays


def cosine(peak: float, updates: int) -> "Schedule":
    """Half a cosine, from the peak to zero."""
    import mlx.optimizers as optimizers

    return optimizers.cosine_decay(peak, updates)


def linear(peak: float, updates: int) -> "Schedule":
    """Return a line from the peak to zero."""
    import mlx.optimizers as optimizers

    return optimizers.linear_schedule(peak, 0.0, updates)


def constant(peak: float, updates: int) -> "Schedule":
    """Return the peak throughout."""
    import mlx.core as mx

    return lambda step: mx.array(peak)


def wsd(peak: float, updates: int) -> "Schedule":
    """Warmup-stable-decay: the peak, then a line to zero over the last fifth of the updates.

    Warmup-stable-decay: https://arxiv.org/abs/2404.06395. A linear decay over 20 %:
    https://arxiv.org/abs/2405.18392
    """
    import mlx.optimizers as optimizers

    decay = max(1, round(WSD_DECAY * updates))
    return optimizers.join_schedules(
        [constant(peak, updates), optimizers.linear_schedule(peak, 0.0, decay)], [updates - decay]
    )


# Each takes the peak and the number of updates after the warm-up (1 or more), and gives the rate by
# the number of updates since the warm-up.
SCHEDULES: dict[str, Callable[[float, int], "Schedule"]] = {
    "cosine": cosine,
    "linear": linear,
    "constant": constant,
    "wsd": wsd,
}
