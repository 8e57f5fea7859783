"""The memory plan of a run, and what was decided by it."""

from dataclasses import dataclass

from .disk import DiskPlan
from .path_choice import MatmulPathChoice
from .plan import MemoryPlan


@dataclass(frozen=True)
class MemoryChoice:
    """The plans of a run (None where none is possible) and their decisions."""

    plan: MemoryPlan | None
    choice: MatmulPathChoice
    recompute: str
    disk: DiskPlan | None = None

    @property
    def peak_gb(self) -> float | None:
        return None if self.plan is None else self.plan.peak_gb
