"""The leaderboard of a sweep: the trials that have a result, the best first."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..config.choices import is_lower_better
from ..display import clock
from ..files import atomic_write, to_json
from ..gates import MEANING
from .plan import Sweep
from .trial import Result, Trial

_FILE = "leaderboard.json"


@dataclass(frozen=True)
class RankedTrial:
    """A trial with its result, and the metric that it is compared by."""

    trial: Trial
    result: Result
    metric: str
    value: float | None

    @property
    def status(self) -> str:
        if self.result.error:
            return f"failed: {self.result.error}"
        if self.value is None:
            return "failed: the metric was not measured, or is not finite"
        names = [MEANING[n] for n, g in (self.result.gates or {}).items() if not g["passed"]]
        return f"gate failed: {', '.join(names)}" if names else "ok"

    @property
    def described(self) -> str:
        """What came of it, for people: the metric, the time, and what is wrong."""
        parts = []
        if self.value is not None:
            parts.append(f"{self.metric} {self.value:.4g} after {self.result.batches:,} batches")
        if self.result.train_s is not None:
            parts.append(clock(self.result.train_s))
        if self.status != "ok":
            parts.append(self.status)
        return " · ".join(parts)

    def order(self) -> tuple:
        """Return the key that sorts the best first: those that pass all gates, then by metric."""
        if self.value is None or self.result.error:
            return (2, 0.0, self.trial.number)
        value = self.value if is_lower_better(self.metric) else -self.value
        return (int(not self.result.passed), value, self.trial.number)

    def to_json(self) -> dict[str, Any]:
        return {
            "trial": self.trial.number,
            "values": self.trial.values,
            self.metric: self.value,
            "status": self.status,
            "pack": None if self.result.error else str(self.trial.pack),
            **{name: value for name, value in vars(self.result).items() if name != "error"},
        }


def leaderboard(sweep: Sweep) -> dict[str, Any]:
    """Return the leaderboard as `packs sweep --json` prints it."""
    rows = [
        RankedTrial(trial, result, *sweep.metric_of(result))
        for trial in sweep.trials
        if (result := trial.result) is not None
    ]
    rows.sort(key=RankedTrial.order)
    metric = sweep.metrics[0]
    best = None
    if rows:
        metric = rows[0].metric
        if rows[0].status == "ok":
            best = str(rows[0].trial.pack)

    return {
        "sweep": str(sweep.folder),
        "search": sweep.config.search,
        "metric": metric,
        "lower_is_better": is_lower_better(metric),
        "trials": len(sweep.trials),
        "parameters": list(sweep.space),
        "best": best,
        "rows": [{"place": place, **row.to_json()} for place, row in enumerate(rows, 1)],
    }


def write_leaderboard(sweep: Sweep) -> None:
    atomic_write(sweep.folder / _FILE, to_json(leaderboard(sweep)))


def text_table(content: Mapping) -> list[str]:
    """Return the lines of a leaderboard as a table."""
    names = content["parameters"]
    metric = content["metric"]
    lines = [["place", "trial", *names, metric, "batches", "pack MB", "time", "status"]]

    for row in content["rows"]:
        place = [str(row["place"]), str(row["trial"])]
        values = [value_text(row["values"][key]) for key in names]
        seconds = clock(row["train_s"]) if row["train_s"] is not None else ""
        forms = {metric: ".4f", "batches": ",", "pack_mb": ".2f"}
        shown = ["" if row[k] is None else format(row[k], form) for k, form in forms.items()]
        lines.append([*place, *values, *shown, seconds, row["status"]])

    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]


def value_text(value: Any) -> str:
    """Return a value of a parameter as text: a float without zeros at its end."""
    return f"{value:g}" if isinstance(value, float) else str(value)
