"""Optimizer and learning-rate schedule from a TrainConfig; both are mlx's own."""

import inspect
from collections.abc import Callable

import mlx.optimizers as optimizers

from .config import TrainConfig
from .errors import PackError, did_you_mean
from .runtime import mx

_CLASSES = {
    "adamw": optimizers.AdamW,
    "adam": optimizers.Adam,
    "adafactor": optimizers.Adafactor,
    "sgd": optimizers.SGD,
    "muon": optimizers.Muon,
    "lion": optimizers.Lion,
}
_SCHEDULES = ("cosine_decay", "linear_schedule", "exponential_decay", "step_decay")


def schedule(config: TrainConfig) -> float | Callable[[mx.array], mx.array]:
    """The learning rate as a number or a function of the update.

    By name: warm-up, then cosine or linear to zero, or constant. As a mapping, mlx-lm's layout:
    ``{name, arguments, warmup, warmup_init}`` with any schedule of mlx.
    """
    if isinstance(config.lr_schedule, dict):
        return _mlx_lm_schedule(config.lr_schedule)
    peak, warmup = config.learning_rate, config.warmup_steps
    updates = -(-config.iters // config.grad_accumulation_steps)
    decay = max(1, updates - warmup)
    if config.lr_schedule == "constant":
        after: float | Callable = peak
    elif config.lr_schedule == "linear":
        after = optimizers.linear_schedule(peak, 0.0, decay)
    else:
        after = optimizers.cosine_decay(peak, decay)
    if not warmup:
        return after
    rise = optimizers.linear_schedule(peak / (warmup + 1), peak, warmup)
    follow = after if callable(after) else (lambda step: mx.array(peak))
    return optimizers.join_schedules([rise, follow], [warmup])


def _mlx_lm_schedule(wanted: dict) -> Callable[[mx.array], mx.array]:
    name, arguments = wanted.get("name"), wanted.get("arguments")
    known = {"name", "arguments", "warmup", "warmup_init"}
    if unknown := set(wanted) - known:
        key = sorted(unknown)[0]
        raise PackError(f"lr_schedule: unknown key '{key}'. {did_you_mean(key, list(known))}")
    if name not in _SCHEDULES or not isinstance(arguments, list) or not arguments:
        raise PackError(
            f"lr_schedule: needs 'name' (one of {', '.join(_SCHEDULES)}) and 'arguments' (a list "
            f"that starts with the learning rate), but got {wanted}."
        )
    try:
        numbers = [float(a) for a in arguments]
        main = getattr(optimizers, name)(*numbers)
    except (TypeError, ValueError) as error:
        raise PackError(f"lr_schedule: {name}({arguments}): {error}") from None
    warmup = int(wanted.get("warmup", 0))
    if not warmup:
        return main
    start = float(wanted.get("warmup_init", 0.0))
    rise = optimizers.linear_schedule(start, numbers[0], warmup)
    return optimizers.join_schedules([rise, main], [warmup + 1])


def make_optimizer(config: TrainConfig) -> optimizers.Optimizer:
    """The optimizer of a run with its schedule and arguments.

    Raises: PackError naming an argument that the optimizer does not take.
    """
    made = _CLASSES[config.optimizer]
    arguments = config.optimizer_config.get(config.optimizer, {}) or {}
    takes = [p for p in inspect.signature(made).parameters if p != "learning_rate"]
    for key in config.optimizer_config:
        if key not in _CLASSES:
            raise PackError(f"optimizer_config: unknown optimizer '{key}'. "
                            f"{did_you_mean(key, list(_CLASSES))}")  # fmt: skip
    for key in arguments:
        if key not in takes:
            raise PackError(f"optimizer_config.{config.optimizer}: unknown argument '{key}'. "
                            f"{did_you_mean(key, takes)}")  # fmt: skip
    extra = {"relative_step": False, "scale_parameter": False, "warmup_init": False}
    if config.optimizer == "adafactor":
        arguments = {**extra, **arguments}  # else it ignores the learning rate it is given
    return made(learning_rate=schedule(config), **arguments)
