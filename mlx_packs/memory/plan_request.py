"""The run that `packs plan` plans, and its limit."""

from dataclasses import dataclass

from ..config.choices import TASKS
from ..config.lora import LoRAConfig
from ..config.schema import TrainConfig
from .estimate import estimate
from .headers import Headers
from .plan import MemoryPlan
from .row_shapes import ShapesOf


@dataclass(frozen=True)
class PlanRequest:
    """A run to plan, and its limit in bytes.

    Attributes:
        specified: Names of the settings that are not reduced.
        shapes_of: The shapes of the batches for some settings; None where rows fill max_seq_length.
    """

    headers: Headers
    memory: int
    lora: LoRAConfig
    train: TrainConfig
    specified: frozenset[str]
    shapes_of: ShapesOf | None = None

    def estimate(self, lora: LoRAConfig, train: TrainConfig) -> MemoryPlan:
        """Return the plan for these settings, by the rows of the run where they are known."""
        shapes = None
        if self.shapes_of:
            shapes = self.shapes_of(train)
        return estimate(self.headers, lora, train, shapes)

    def longest(self, train: TrainConfig) -> int | None:
        """Return the tokens of a row of the longest batch; None where the rows are not known."""
        return max(self.shapes_of(train))[0] if self.shapes_of else None

    @property
    def in_batch(self) -> bool:
        """Whether the other examples of a batch are the negatives of each."""
        return TASKS[self.train.task].in_batch
