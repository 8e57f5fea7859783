"""What was decided for a run by its memory plan, and by times of its matmul paths."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .plan import MemoryPlan

if TYPE_CHECKING:
    from .disk import DiskPlan


@dataclass(frozen=True)
class MatmulPathChoice:
    matmul_path: str
    step_ms: dict[str, float]  # that each measured path would take
    reason: str  # where the times are from or why there are none, why another path was left out

    def line(self) -> str:
        times = " · ".join(f"{name} {ms:,.0f} ms" for name, ms in self.step_ms.items())
        choice = self.matmul_path
        if times:
            choice = f"{times} → {choice}"
        if self.reason:
            choice = f"{choice} ({self.reason})"
        return choice


@dataclass(frozen=True)
class MemoryChoice:
    """The plans of a run (None where none is possible) and their decisions."""

    plan: MemoryPlan | None
    choice: MatmulPathChoice
    recompute: str
    disk: "DiskPlan | None" = None

    @property
    def peak_gb(self) -> float | None:
        if self.plan is None:
            return None
        return self.plan.peak_gb
