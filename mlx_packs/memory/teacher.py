"""The memory of a teacher that is loaded beside its student."""

from dataclasses import replace
from functools import cache

from .. import runtime
from ..config.lora import LoRAConfig
from ..config.schema import TrainConfig
from .estimate import estimator_of
from .plan import MemoryPlan
from .read import read_headers


def beside_teacher(plan: MemoryPlan, name: str) -> MemoryPlan:
    """Return the plan of a student with the frozen weights of a teacher."""
    return replace(plan, base=plan.base + teacher_bytes(name))


@cache
def teacher_bytes(name: str) -> int:
    """Return the bytes of a teacher's weights; on a CPU with dense copies of quantized ones.

    Raises a PackError if its headers cannot be read, or no plan knows its architecture.
    """
    headers = read_headers(name)
    estimator = estimator_of(headers.config)
    path = "dense" if runtime.on_cpu() else "quantized"
    train = headers.as_loaded(TrainConfig(matmul_path=path))
    return estimator.estimate(headers, LoRAConfig(), train, estimator.smallest_shape(train)).base
