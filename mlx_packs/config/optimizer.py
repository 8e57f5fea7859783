"""The settings of the optimizer and of its learning rate."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from .choices import OPTIMIZERS, SCHEDULES, OptimizerFacts
from .fields import Fault, Settings, option

_optimizer = partial(option, section="Optimization", own_layers="optimizer")
_schedule = partial(_optimizer, phase=True)

# Settings that are arguments of the optimizer, by the same names in `optimizer_config`.
ARGUMENTS = ("bias_correction", "weight_decay", "betas")


@dataclass(frozen=True, repr=False, kw_only=True)
class OptimizerConfig(Settings):
    """Settings of the optimizer and of its learning rate."""

    learning_rate: float = _schedule(
        2e-4,
        "Peak learning rate, as in PEFT and TRL.",
        metavar="RATE",
        above=0,
        flags=("--learning-rate", "--lr"),
    )
    lr_schedule: str | dict = _schedule(
        "cosine",
        "Learning-rate schedule after the warm-up. YAML accepts any schedule of MLX, as in mlx-lm.",
        choices=SCHEDULES,
    )
    warmup_steps: int = _schedule(
        0,
        "Updates over which the learning rate rises linearly from 0, its value in the first "
        "update, to its peak.",
        at_least=0,
    )
    warmup_ratio: float = _schedule(
        0.0,
        "Share of the updates for the warm-up, rounded up, instead of --warmup-steps.",
        metavar="SHARE",
        at_least=0,
        at_most=1,
    )
    warmup_from_zero: bool = _optimizer(
        True,
        "Start the warm-up at a rate of 0, as PEFT and TRL do; false starts it at the first of "
        "N + 1 equal steps.",
        flags=(),
    )
    optimizer: str = _optimizer(
        "adamw",
        "Optimizer; adamw_8bit stores its moments in 8 bits.",
        choices=OPTIMIZERS,
        memory=True,
    )
    bias_correction: bool = _optimizer(
        True,
        "Correct the bias of the moments of Adam and AdamW, as torch does. Recipes of mlx-lm train "
        "without it, unless they say otherwise.",
    )
    weight_decay: float | None = _optimizer(
        None,
        "Weight decay of the optimizer.",
        shown_default="0.01 with adamw, adamw_8bit and muon, 0 with the others",
        metavar="DECAY",
        at_least=0,
    )
    betas: tuple[float, ...] = _optimizer(
        (),
        "Decay of the first and of the second moment, separated by a comma.",
        shown_default="0.9,0.999; 0.9,0.99 with lion",
        metavar="BETA1,BETA2",
    )
    optimizer_config: dict = _optimizer(
        {},
        "Arguments of the optimizer, by its name, as in mlx-lm.",
        flags=(),
    )
    loraplus_lr_ratio: float = _optimizer(
        1.0,
        "Learning rate of B, the second factor of every adapter, divided by the rate of all other "
        "parameters (LoRA+).",
        metavar="RATIO",
        above=0,
        method="lora",
    )

    def _conflicts(self) -> Iterator[Fault]:
        named = self.changed(("warmup_steps", "warmup_ratio"))
        if len(named) > 1:
            yield Fault(
                "warmup_ratio", "cannot be combined with --warmup-steps. Give one.", "conflict"
            )
        if named and not isinstance(self.lr_schedule, str):
            instead = self.warmup_steps or "N"
            text = (
                f"does not apply to a schedule with arguments. Write lr_schedule.warmup: {instead}."
            )
            yield Fault(named[0], text, "conflict")
        if self.optimizer in OPTIMIZERS:
            yield from self._conflicts_of_optimizer(OPTIMIZERS[self.optimizer])

    def _conflicts_of_optimizer(self, facts: OptimizerFacts) -> Iterator[Fault]:
        if self.weight_decay is not None and facts.weight_decay is None:
            text = f"{self.optimizer} has none. Use --optimizer adamw."
            yield Fault("weight_decay", text, "conflict")
        if self.betas and not facts.betas:
            yield Fault("betas", f"{self.optimizer} has none. Leave them out.", "conflict")
        if self.betas and not (len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas)):
            text = f"must be two numbers in [0, 1), but is {', '.join(map(str, self.betas))}."
            yield Fault("betas", text)


def with_arguments(settings: Mapping[str, Any], optimizer: Any = None) -> dict[str, Any]:
    """Return settings with the arguments of their optimizer as keys, not in `optimizer_config`.

    A key that has a value stays as it is.
    """
    name = optimizer or settings.get("optimizer") or OptimizerConfig.optimizer
    by_optimizer = settings.get("optimizer_config")
    if not isinstance(by_optimizer, Mapping) or not isinstance(name, str):
        return dict(settings)
    arguments = by_optimizer.get(name)
    if not isinstance(arguments, Mapping):
        return dict(settings)

    unset = [key for key in ARGUMENTS if settings.get(key) in (None, ())]
    moved = {key: arguments[key] for key in unset if arguments.get(key) is not None}
    rest = {key: value for key, value in arguments.items() if key not in ARGUMENTS}

    config = {key: value for key, value in by_optimizer.items() if key != name}
    if rest:
        config[name] = rest
    return {**settings, **moved, "optimizer_config": config}
