"""Settings that several packs in one batch can have."""

from ..errors import PackError, flag_of
from .choices import TASKS
from .recipe import Recipe

# Settings that have to be one of these. Others change the frozen part of the model, draw random
# numbers in the forward pass, cut batches, or end one run before the others.
_TOGETHER: dict[str, tuple] = {
    "method": ("lora",),
    "task": tuple(name for name, facts in TASKS.items() if facts.together),
    "phases": ((),),
    "objective": ("transformer",),
    "for_merge": ("none",),
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
                f"{flag_of(name)}{shown}: is not for several packs in one batch (--seeds). Leave "
                "it out, or train one pack at a time.",
                "conflict",
                name,
            )
