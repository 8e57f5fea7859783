"""The settings of training on several machines."""

from dataclasses import dataclass
from functools import partial

from .fields import option
from .preferences import PreferenceSettings

_machines = partial(option, section="Several machines")


@dataclass(frozen=True)
class MachineSettings(PreferenceSettings):
    """The part of `TrainConfig` that is about several machines."""

    exchange_dtype: str = _machines(
        "float32",
        "Dtype in which several machines exchange gradients; half precision halves the traffic.",
        choices=("float32", "bfloat16", "float16"),
        resumable=True,
    )
