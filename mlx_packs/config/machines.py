"""The settings of training on several machines."""

from dataclasses import dataclass
from functools import partial

from .fields import option
from .preferences import PreferenceSettings

_machines = partial(option, section="Several machines")


@dataclass(frozen=True, repr=False)
class MachineSettings(PreferenceSettings):
    """The part of `TrainConfig` that is about several machines."""

    exchange_dtype: str = _machines(
        "float32",
        "Dtype in which several machines exchange gradients; half precision halves the traffic.",
        choices=("float32", "bfloat16", "float16"),
        resumable=True,
    )
    pipeline: bool = _machines(
        False,
        "Split the blocks of the base over the machines of --hosts, for a base that one cannot hold; "
        "the pieces of --micro-batches pass from machine to machine.",
        resumable=True,
    )
