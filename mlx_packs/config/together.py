"""Settings that several packs in one batch can have, and those by which they can differ."""

from typing import Any

from ..errors import PackError, flag_of
from .choices import TASKS
from .recipe import Recipe

# What `auto` means for several packs: one pass computes all rows whole.
SETTINGS = {"cache_frozen": "off", "share_prefix": "off"}
# Settings of the adapters, the update and the loss that each pack has of its own.
OWN = frozenset(
    (
        *("seed", "iters", "rank", "alpha", "rank_pattern", "alpha_pattern", "rslora"),
        *("learning_rate", "lr_schedule", "warmup_steps", "warmup_ratio", "warmup_from_zero"),
        *("optimizer", "bias_correction", "weight_decay", "betas", "optimizer_config"),
        *("loraplus_lr_ratio", "max_grad_norm", "label_smoothing", "z_loss", "beta"),
        *("simpo_gamma", "cpo_alpha", "desirable_weight", "undesirable_weight"),
    )
)

# Settings that have to be one of these. Others change the frozen part of the model, draw random
# numbers in the forward pass, cut batches, or end one run before the others.
_TOGETHER: dict[str, tuple] = {
    "method": ("lora",),
    "task": tuple(name for name, facts in TASKS.items() if facts.together),
    "phases": ((),),
    "objective": ("transformer",),
    "modules_to_save": ((),),
    "dropout": (0.0,),
    "neftune_noise_alpha": (0.0,),
    "micro_batches": (1,),
    "cache_frozen": ("auto", "off"),
    "share_prefix": ("auto", "off"),
    "patience": (None,),
    "time": (None,),
    "on_nan": ("stop", "skip"),
    "pipeline": (False,),
    "report_to": (None,),
}


def check_together(recipe: Recipe) -> None:
    """Raise a PackError for a setting that packs in one batch cannot have."""
    values = {**vars(recipe.lora), **vars(recipe.train), **recipe.run}
    for name, allowed in _TOGETHER.items():
        value = values.get(name, allowed[0])
        if value not in allowed:
            shown = "" if name == "phases" else f" {value}"
            raise PackError(
                f"{flag_of(name)}{shown}: is not for several packs in one batch. Leave it out, or "
                "train one pack at a time.",
                "conflict",
                name,
            )


def common_settings(recipe: Recipe) -> dict[str, Any]:
    """Return the settings that packs in one batch must have in common, by name."""
    return {name: value for name, value in recipe.to_json().items() if name not in OWN}
