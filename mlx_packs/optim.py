"""Optimizer and learning-rate schedule from a TrainConfig: mlx's own, and AdamW in 8 bits."""

import inspect
import math
from collections.abc import Callable, Mapping

import mlx.optimizers as optimizers

from .config.schema import TrainConfig, typed_value
from .errors import PackError, did_you_mean
from .ops.blockwise import decode, encode
from .runtime import mx

_MIN_8BIT_SIZE = 4096  # numbers; smaller states stay float32, as in bitsandbytes


class AdamW8bit(optimizers.AdamW):
    """AdamW whose moments are kept in 8 bits: 2.03 bytes a weight instead of 8.

    The first moment has signed codes, the second unsigned ones, in blocks of 256 with a float32
    scale each; the update itself is computed in float32. Its arguments are AdamW's.

    8-bit optimizers: https://arxiv.org/abs/2110.02861
    """

    _MOMENTS = (("m", True), ("v", False))

    def init_single(self, parameter: mx.array, state: dict) -> None:
        super().init_single(parameter, state)
        if parameter.size >= _MIN_8BIT_SIZE:
            self._pack(state)

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: dict) -> mx.array:
        if "m_scales" not in state:
            return super().apply_single(gradient, parameter, state)
        for name, signed in self._MOMENTS:
            scales = state.pop(f"{name}_scales")
            state[name] = decode(state[name], scales, parameter.shape, signed)
        updated = super().apply_single(gradient, parameter, state)
        self._pack(state)
        return updated

    def _pack(self, state: dict) -> None:
        for name, signed in self._MOMENTS:
            state[name], state[f"{name}_scales"] = encode(state[name], signed)


_CLASSES = {
    "adamw": optimizers.AdamW,
    "adamw_8bit": AdamW8bit,
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
    if unknown := {str(key) for key in wanted} - known:
        key = sorted(unknown)[0]
        raise PackError(f"lr_schedule: unknown key '{key}'. {did_you_mean(key, list(known))}")
    if name not in _SCHEDULES or not isinstance(arguments, (list, tuple)) or not arguments:
        raise PackError(
            f"lr_schedule: needs 'name' (one of {', '.join(_SCHEDULES)}) and 'arguments' (a list "
            f"that starts with the learning rate), but got {wanted}."
        )
    numbers = [_number(a, f"lr_schedule.arguments[{i}]") for i, a in enumerate(arguments)]
    if numbers[0] <= 0:
        raise PackError(
            "lr_schedule.arguments[0] is the learning rate and must be positive, but got "
            f"{numbers[0]}."
        )
    warmup = typed_value(wanted.get("warmup") or 0, int, "lr_schedule.warmup")
    start = _number(wanted.get("warmup_init") or 0.0, "lr_schedule.warmup_init")
    if warmup < 0 or start < 0:
        raise PackError(
            f"lr_schedule: warmup and warmup_init must be 0 or more, got {warmup} and {start}."
        )
    try:
        main = getattr(optimizers, name)(*numbers)
    except (TypeError, ValueError) as error:
        raise PackError(f"lr_schedule: {name}({arguments}): {error}") from None
    if not warmup:
        return main
    rise = optimizers.linear_schedule(start, numbers[0], warmup)
    return optimizers.join_schedules([rise, main], [warmup + 1])


def unused_learning_rate(config: TrainConfig) -> str | None:
    """A sentence if ``learning_rate`` was given beside a schedule that starts at another one."""
    if not isinstance(config.lr_schedule, dict):
        return None
    first = float(config.lr_schedule["arguments"][0])
    if config.learning_rate in (TrainConfig.learning_rate, first):
        return None
    return (
        f"learning_rate {config.learning_rate:g} is not used: lr_schedule.arguments starts with "
        f"{first:g}, and that counts, as in mlx-lm"
    )


def make_optimizer(config: TrainConfig, since: int = 0) -> optimizers.Optimizer:
    """The optimizer of a run with its schedule and arguments, after one update on trial.

    Args:
        since: updates that its state will have seen when the schedule begins.
    Raises: PackError naming an argument that the optimizer does not take, or a value that it does
        not work with.
    """
    made, arguments = _CLASSES[config.optimizer], _arguments(config)
    try:
        trial = made(learning_rate=schedule(config), **arguments)
        moved = trial.apply_gradients({"w": mx.ones((2, 2))}, {"w": mx.ones((2, 2))})["w"]
        works = mx.isfinite(moved).all().item()
    except (TypeError, ValueError, RuntimeError, ArithmeticError, IndexError) as error:
        raise PackError(f"optimizer_config.{config.optimizer}: {error}") from None
    if not works:
        raise PackError(
            f"optimizer {config.optimizer} with {arguments} and lr_schedule {config.lr_schedule}: "
            "the first update is not finite; check their values."
        )
    rate = schedule(config)
    if since and callable(rate):
        return made(learning_rate=lambda step: rate(step - since), **arguments)
    return made(learning_rate=rate, **arguments)


def carry_state(old: optimizers.Optimizer, new: optimizers.Optimizer) -> None:
    """Go on with another optimizer of the same kind: all of its state but the learning rate."""
    rate = new.state["learning_rate"]
    new.state = {**old.state, "learning_rate": rate}


def _arguments(config: TrainConfig) -> dict:
    """The arguments of the chosen optimizer, each typed as its default is."""
    for key, values in config.optimizer_config.items():
        if key not in _CLASSES:
            raise PackError(
                f"optimizer_config: unknown optimizer '{key}'. "
                f"{did_you_mean(str(key), list(_CLASSES))}"
            )
        if not isinstance(values, Mapping | None):
            raise PackError(f"optimizer_config.{key}: must be a mapping, but got {values!r}.")
    where = f"optimizer_config.{config.optimizer}"
    parameters = inspect.signature(_CLASSES[config.optimizer]).parameters
    defaults = {name: p.default for name, p in parameters.items() if name != "learning_rate"}
    given = config.optimizer_config.get(config.optimizer) or {}
    for key in given:
        if key not in defaults:
            raise PackError(
                f"{where}: unknown argument '{key}'. {did_you_mean(str(key), list(defaults))}"
            )
    typed = {key: _as_default(v, defaults[key], f"{where}.{key}") for key, v in given.items()}
    if config.optimizer == "adafactor":  # else it ignores the learning rate it is given
        return {"relative_step": False, "scale_parameter": False, "warmup_init": False} | typed
    return typed


def _as_default(value, default, key: str):
    """``value`` of the kind of ``default``: number, switch, or a list of as many numbers."""
    if isinstance(default, (list, tuple)):
        if not isinstance(value, (list, tuple)) or len(value) != len(default):
            raise PackError(f"{key} must be a list of {len(default)} numbers, but got {value!r}.")
        return [_number(v, f"{key}[{i}]") for i, v in enumerate(value)]
    if default is None and value is None:
        return None
    if isinstance(default, (bool, int)):
        return typed_value(value, type(default), key)
    return _number(value, key)


def _number(value, key: str) -> float:
    number = typed_value(value, float, key)
    if not math.isfinite(number):
        raise PackError(f"{key} must be finite, but got {number}.")
    return number
