"""What steps on Apple GPUs shall cost, beside what the latest records predict."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..history import Record
from .capture import MLX_LM, OURS

CHECKPOINTED = f"{MLX_LM} --grad-checkpoint"
TIME, PEAK = "time", "peak activations"
_STEP = "{}, {}, 100% supervised, rank 16"
_EPOCH = "{}, 4 sequences of at most 2048, 4000 examples, {} supervised, rank 16"


@dataclass(frozen=True)
class Goal:
    """At most ``limit``, in every shape, by the best of some implementations of ours.

    metric: `TIME` or `PEAK` as a share of ``baseline``'s, or a metric of records.
    """

    what: str
    shapes: tuple[str, ...]
    paths: tuple[str, ...]
    metric: str
    limit: float
    baseline: str = MLX_LM

    @property
    def implementations(self) -> list[str]:
        return [f"{OURS} {path}" for path in self.paths]


def _goals() -> list[Goal]:
    goals = []
    paths = ("quantized", "transient")
    for model, title in (("qwen3_4b", "Qwen3-4B"), ("qwen3_0_6b", "Qwen3-0.6B")):
        shapes = tuple(_STEP.format(model, size) for size in ("1 x 2048", "4 x 512"))
        goals.append(Goal(f"{title}, 1 x 2048 and 4 x 512: time", shapes, paths, TIME, 0.90))
        if model == "qwen3_4b":
            goals.append(Goal(f"{title}, the same: peak activations", shapes, paths, PEAK, 0.70))
    for model, title in (("qwen3_4b", "Qwen3-4B"), ("qwen3_0_6b", "Qwen3-0.6B")):
        shapes = tuple(_STEP.format(model, size) for size in ("1 x 2048", "4 x 512"))
        block = ("quantized, recompute block", "transient, recompute block")
        what = f"{title}, blocks recomputed"
        goals += [
            Goal(f"{what}: time", shapes, block, TIME, 0.92, CHECKPOINTED),
            Goal(f"{what}: peak activations", shapes, block, PEAK, 0.40, CHECKPOINTED),
        ]
    packed = ("quantized, packed", "transient, packed")
    for share, limits in (("100%", (0.92, 0.83)), ("30%", (0.85, 0.78))):
        shapes = (_EPOCH.format("qwen3_4b", share),)
        what = f"Qwen3-4B, real batches, {share} supervised"
        goals += [
            Goal(f"{what}, padded: time per target", shapes, paths, TIME, limits[0]),
            Goal(f"{what}, packed: time per target", shapes, packed, TIME, limits[1]),
        ]
    first = (_STEP.format("qwen3_4b", "1 x 2048"),)
    return [*goals, Goal("Qwen3-4B, 1 x 2048: primitives", first, paths, "primitives", 5000)]


GOALS = _goals()


def table(records: Sequence[Record]) -> str:
    """Every goal, the figure of the latest records, and whether it is met; empty without records."""
    newest: dict[tuple[str, str, str], Record] = {}
    for r in records:
        key = r.shape, r.implementation, r.metric
        if r.task in ("graph", "graph batches") and (
            key not in newest or r.date >= newest[key].date
        ):
            newest[key] = r
    if not newest:
        return ""
    rows = [["workload", "at most", "predicted", "implementation", "", "commit"], ["---"] * 6]
    for goal in GOALS:
        of = "" if goal.metric not in (TIME, PEAK) else f" x {goal.baseline}"
        limit = f"{goal.limit:,g}{of}"
        worst = _worst(goal, newest)
        if worst is None:
            rows.append([goal.what, limit, "not recorded", "", "", ""])
            continue
        value, record = worst
        verdict = "met" if value <= goal.limit else "**missed**"
        shown = f"{value:,.0f}" if of == "" else f"{value:.3f}"
        name = record.implementation.removeprefix(f"{OURS} ")
        rows.append([goal.what, limit, shown, name, verdict, record.commit])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _worst(goal: Goal, records: dict[tuple[str, str, str], Record]) -> tuple[float, Record] | None:
    """The largest figure over shapes, each by the implementation of ours that is best there."""
    best = []
    for shape in goal.shapes:
        figures = list(_figures(goal, shape, records))
        if not figures:
            return None
        best.append(min(figures, key=lambda figure: figure[0]))
    return max(best, key=lambda figure: figure[0])


def _figures(
    goal: Goal, shape: str, records: dict[tuple[str, str, str], Record]
) -> Iterable[tuple[float, Record]]:
    metric = f"time over {goal.baseline}" if goal.metric == TIME else goal.metric
    base = records.get((shape, goal.baseline, PEAK))
    for name in goal.implementations:
        if (own := records.get((shape, name, metric))) is None:
            continue
        if goal.metric != PEAK:
            yield own.p50, own
        elif base is not None:
            yield own.p50 / base.p50, own
