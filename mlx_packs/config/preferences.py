"""The settings of training on preferences."""

from dataclasses import dataclass
from functools import partial

from .choices import PREFERENCE_TASKS
from .conflicts import TrainConflicts
from .fields import option

_preference = partial(option, section="Preferences")
_rated = partial(_preference, tasks=("kto",), metavar="WEIGHT", above=0)


@dataclass(frozen=True)
class PreferenceSettings(TrainConflicts):
    """The part of `TrainConfig` that tasks of preferences have."""

    beta: float = _preference(
        0.1,
        "Weight of the distance from the reference (dpo, kto), of the odds ratio (orpo), or scale of "
        "the log-probabilities (cpo, simpo).",
        shown_default="0.1; 2 with --task simpo",
        tasks=PREFERENCE_TASKS,
        metavar="BETA",
        above=0,
    )
    simpo_gamma: float = _preference(
        0.5,
        "Margin by which the chosen completion is to be better (simpo).",
        tasks=("simpo",),
        metavar="GAMMA",
        at_least=0,
    )
    cpo_alpha: float = _preference(
        1.0,
        "Weight of the chosen completion's cross-entropy (cpo).",
        tasks=("cpo",),
        metavar="ALPHA",
        at_least=0,
    )
    desirable_weight: float = _rated(1.0, "Weight of the desirable completions (kto).")
    undesirable_weight: float = _rated(1.0, "Weight of the undesirable completions (kto).")
