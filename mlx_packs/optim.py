"""Optimizer and learning-rate schedule from a TrainConfig: mlx's own, and AdamW in 8 bits."""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import mlx.optimizers as optimizers
from mlx.utils import tree_map_with_path

from .config import choices
from .config.choices import registered
from .config.schema import TrainConfig
from .config.values import setting_error, typed_value
from .errors import did_you_mean
from .ops.blockwise import decode, encode
from .runtime import mx

_MIN_8BIT_SIZE = 4096  # numbers; smaller states stay float32, as in bitsandbytes


class AdamW8bit(optimizers.AdamW):
    """AdamW whose moments are stored in 8 bits: 2.03 bytes per parameter instead of 8.

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


OPTIMIZERS: dict[str, type[optimizers.Optimizer]] = registered(
    choices.OPTIMIZERS,
    {
        "adamw": optimizers.AdamW,
        "adamw_8bit": AdamW8bit,
        "adam": optimizers.Adam,
        "adafactor": optimizers.Adafactor,
        "sgd": optimizers.SGD,
        "muon": optimizers.Muon,
        "lion": optimizers.Lion,
    },
)
Schedule = Callable[[mx.array], mx.array]
_WSD_DECAY = 0.2  # share of the updates in which `wsd` decays


def _linear(peak: float, updates: int) -> Schedule:
    return optimizers.linear_schedule(peak, 0.0, updates)


def _constant(peak: float, updates: int) -> Schedule:
    return lambda step: mx.array(peak)


def _wsd(peak: float, updates: int) -> Schedule:
    """Warmup-stable-decay: the peak, then a line to zero over the last fifth of the updates.

    Warmup-stable-decay: https://arxiv.org/abs/2404.06395. A linear decay over 20 %:
    https://arxiv.org/abs/2405.18392
    """
    decay = max(1, round(_WSD_DECAY * updates))
    return optimizers.join_schedules(
        [_constant(peak, updates), _linear(peak, decay)], [updates - decay]
    )


# Each takes the peak and the number of updates after the warm-up (1 or more), and gives the rate by
# the number of updates since the warm-up.
SCHEDULES: dict[str, Callable[[float, int], Schedule]] = registered(
    choices.SCHEDULES,
    {"cosine": optimizers.cosine_decay, "linear": _linear, "constant": _constant, "wsd": _wsd},
)
_MLX_SCHEDULES = ("cosine_decay", "linear_schedule", "exponential_decay", "step_decay")


def schedule(config: TrainConfig) -> Schedule:
    """Return the learning rate as a function of the number of updates.

    By name: a linear warm-up, then one of `SCHEDULES`, which equal the schedules of transformers by
    the same names. As a mapping, mlx-lm's form: ``{name, arguments, warmup, warmup_init}`` with any
    schedule of MLX.
    """
    if isinstance(config.lr_schedule, dict):
        return _mlx_lm_schedule(config.lr_schedule)

    peak = config.learning_rate
    warmup = warmup_updates(config)
    main = SCHEDULES[config.lr_schedule](peak, max(1, updates_of(config) - warmup))

    if not warmup:
        return main

    start = 0.0 if config.warmup_from_zero else peak / (warmup + 1)
    rise = optimizers.linear_schedule(start, peak, warmup)
    return optimizers.join_schedules([rise, main], [warmup])


def updates_of(config: TrainConfig) -> int:
    return -(-config.iters // config.grad_accumulation_steps)


def warmup_updates(config: TrainConfig) -> int:
    if isinstance(config.lr_schedule, dict):
        return int(config.lr_schedule.get("warmup") or 0)
    return config.warmup_steps or math.ceil(updates_of(config) * config.warmup_ratio)


def _mlx_lm_schedule(values: dict) -> Schedule:
    name = values.get("name")
    arguments = values.get("arguments")
    keys = {"name", "arguments", "warmup", "warmup_init"}

    if unknown := {str(key) for key in values} - keys:
        text = f"is not a setting. {did_you_mean(min(unknown), list(keys))}"
        raise setting_error(text, f"lr_schedule.{min(unknown)}", code="unknown")
    if name not in _MLX_SCHEDULES:
        text = f"must be one of {', '.join(_MLX_SCHEDULES)}, but is {name!r}."
        raise setting_error(text, "lr_schedule.name", code="unknown")
    if not isinstance(arguments, (list, tuple)) or not arguments:
        text = f"must be a list that starts with the learning rate, but is {arguments!r}."
        raise setting_error(text, "lr_schedule.arguments")

    numbers = [_number(a, f"lr_schedule.arguments[{i}]") for i, a in enumerate(arguments)]
    if numbers[0] <= 0:
        text = f"is the learning rate and must be above 0, but is {numbers[0]}."
        raise setting_error(text, "lr_schedule.arguments[0]")

    warmup = typed_value(values.get("warmup") or 0, int, "lr_schedule.warmup")
    start = _number(values.get("warmup_init") or 0.0, "lr_schedule.warmup_init")
    for key, value in (("warmup", warmup), ("warmup_init", start)):
        if value < 0:
            raise setting_error(f"must be at least 0, but is {value}.", f"lr_schedule.{key}")

    from mlx_lm.tuner.utils import build_schedule

    try:
        return build_schedule(
            {"name": name, "arguments": numbers, "warmup": warmup, "warmup_init": start}
        )
    except (TypeError, ValueError) as error:
        raise setting_error(f"{name}({arguments}): {error}", "lr_schedule.arguments") from None


def make_optimizer(config: TrainConfig, since: int = 0) -> optimizers.Optimizer:
    """Return the optimizer of a run, tried with one update so that a wrong value shows early.

    The schedule begins after ``since`` updates.

    Raises:
        PackError: an argument is unknown to the optimizer, or its value does not work.
    """
    optimizer = OPTIMIZERS[config.optimizer]
    arguments = _arguments(config)
    where = f"optimizer_config.{config.optimizer}"

    try:
        trial = optimizer(learning_rate=schedule(config), **arguments)
        updated = trial.apply_gradients({"w": mx.ones((2, 2))}, {"w": mx.ones((2, 2))})["w"]
        is_finite = mx.isfinite(updated).all().item()
    except (TypeError, ValueError, RuntimeError, ArithmeticError, IndexError) as error:
        raise setting_error(str(error), where) from None

    if not is_finite:
        values = f"{arguments} and lr_schedule {config.lr_schedule}"
        raise setting_error(
            f"the first update with {values} is not finite. Check these values.", where
        )

    rate = schedule(config)
    ratio = config.loraplus_lr_ratio
    if not since:
        return _with_ratio(optimizer(learning_rate=rate, **arguments), ratio)

    def shifted(step: mx.array) -> mx.array:
        # updates that were skipped are not counted, so that a phase may begin with fewer
        return rate(mx.maximum(step, since) - since)

    return _with_ratio(optimizer(learning_rate=shifted, **arguments), ratio)


def _with_ratio(optimizer: optimizers.Optimizer, ratio: float) -> optimizers.Optimizer:
    """Return an optimizer that moves B of adapters ``ratio`` times as far as the rest.

    The updates of all optimizers here are linear in the learning rate, weight decay included, so
    it is the learning rate of B that is ``ratio`` times the other.

    LoRA+: https://arxiv.org/abs/2402.12354
    """
    if ratio == 1:
        return optimizer

    apply = optimizer.apply_gradients

    def moved(path: str, new: mx.array, old: mx.array) -> mx.array:
        if "lora_b" not in path.split("."):
            return new
        return old + ratio * (new - old)

    def apply_gradients(gradients: dict, parameters: dict) -> dict:
        return tree_map_with_path(moved, apply(gradients, parameters), parameters)

    optimizer.apply_gradients = apply_gradients  # its class decides how overflows are skipped
    return optimizer


def carry_state(old: optimizers.Optimizer, new: optimizers.Optimizer) -> None:
    """Continue with another optimizer of the same kind: all of its state but the learning rate."""
    new.state = {**old.state, "learning_rate": new.state["learning_rate"]}


def _arguments(config: TrainConfig) -> dict:
    """Return the arguments of the chosen optimizer, each typed as its default is."""
    for key, values in config.optimizer_config.items():
        where = f"optimizer_config.{key}"
        if key not in OPTIMIZERS:
            text = f"is not an optimizer. {did_you_mean(str(key), list(OPTIMIZERS))}"
            raise setting_error(text, where, code="unknown")
        if not isinstance(values, Mapping | None):
            raise setting_error(f"must be a mapping, but is {values!r}.", where)

    where = f"optimizer_config.{config.optimizer}"
    parameters = inspect.signature(OPTIMIZERS[config.optimizer]).parameters
    defaults = {name: p.default for name, p in parameters.items() if name != "learning_rate"}
    arguments = config.optimizer_config.get(config.optimizer) or {}

    for key in arguments:
        if key not in defaults:
            text = f"is not an argument. {did_you_mean(str(key), list(defaults))}"
            raise setting_error(text, f"{where}.{key}", code="unknown")

    typed = {key: _as_default(v, defaults[key], f"{where}.{key}") for key, v in arguments.items()}
    typed |= _first_class_arguments(config)

    if config.optimizer == "adafactor":  # by default it ignores the learning rate
        return {"relative_step": False, "scale_parameter": False, "warmup_init": False} | typed
    return typed


def _first_class_arguments(config: TrainConfig) -> dict:
    """Return the arguments of the optimizer that are settings of their own."""
    arguments: dict[str, Any] = {}
    if choices.OPTIMIZERS[config.optimizer].corrects_bias:
        arguments["bias_correction"] = config.bias_correction
    if config.weight_decay is not None:
        arguments["weight_decay"] = config.weight_decay
    if config.betas:
        arguments["betas"] = list(config.betas)

    return arguments


def _as_default(value: Any, default: Any, key: str) -> Any:
    """Return ``value`` as the type of ``default``: number, switch, or list of as many numbers."""
    if isinstance(default, (list, tuple)):
        if not isinstance(value, (list, tuple)) or len(value) != len(default):
            raise setting_error(f"must be a list of {len(default)} numbers, but is {value!r}.", key)
        return [_number(v, f"{key}[{i}]") for i, v in enumerate(value)]

    if default is None and value is None:
        return None
    if isinstance(default, (bool, int)):
        return typed_value(value, type(default), key)
    return _number(value, key)


def _number(value: Any, key: str) -> float:
    number = typed_value(value, float, key)
    if not math.isfinite(number):
        raise setting_error(f"must be finite, but is {number}.", key)
    return number
