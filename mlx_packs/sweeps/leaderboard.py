"""The leaderboard of a sweep: a table, a CSV file, JSON and a page."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..display import clock
from ..files import atomic_write, to_json
from ..gates import MEANING
from ..report.leaderboard import Entry, Leaderboard, render
from ..report.scatter import Axis, value_text
from .metrics import is_lower_better
from .sweep import Sweep
from .trial import Result, Trial

NAME = "leaderboard"


@dataclass(frozen=True)
class Row:
    """A trial with its last result."""

    trial: Trial
    rung: int
    result: Result
    value: float | None  # of the metric

    @property
    def status(self) -> str:
        """What became of the trial, in one or a few words."""
        if self.result.error:
            return f"failed: {self.result.error}"
        if self.value is None:
            return "failed: the metric was not measured, or is not finite"
        names = [MEANING[n] for n, g in (self.result.gates or {}).items() if not g["passed"]]
        return f"gate failed: {', '.join(names)}" if names else "ok"


def metric_of(sweep: Sweep, result: Result) -> tuple[str, float | None]:
    """Return the metric that a sweep compares by, and its value; None if it is not known."""
    values = result.metrics or {}
    name = next((name for name in sweep.metrics if name in values), sweep.metrics[0])
    return name, values.get(name)


def ranked(sweep: Sweep, rung: int | None = None) -> list[Row]:
    """Return the trials that have a result, the best first.

    Those that pass all gates come first; the metric, that of the pack that is there, decides.

    Args:
        sweep: the sweep.
        rung: whose results count; None takes each trial's last.
    """
    rows = []
    for trial in sweep.trials:
        last = trial.last_result(len(sweep.rungs.batches))
        if rung is not None:
            last = (rung, result) if (result := trial.result(rung)) else None
        if last:
            rows.append(Row(trial, *last, metric_of(sweep, last[1])[1]))

    def key(row: Row) -> tuple:
        name = metric_of(sweep, row.result)[0]
        worst = (
            float("inf") if row.value is None else row.value * (1 if is_lower_better(name) else -1)
        )
        known = row.value is not None and not row.result.error
        return (not known, not row.result.passed, worst, row.trial.number)

    return sorted(rows, key=key)


def best_of(rows: Sequence[Row]) -> Row | None:
    """Return the best trial that passes all gates; None without one."""
    return rows[0] if rows and rows[0].status == "ok" else None


def to_json_rows(sweep: Sweep) -> dict[str, Any]:
    """Return the leaderboard as `packs sweep --json` prints it."""
    rows = ranked(sweep)
    best = best_of(rows)
    name = metric_of(sweep, rows[0].result)[0] if rows else sweep.metrics[0]
    return {
        "sweep": str(sweep.folder),
        "search": sweep.config.search,
        "metric": name,
        "lower_is_better": is_lower_better(name),
        "trials": len(sweep.trials),
        "best": None if best is None else str(best.trial.pack),
        "rows": [
            {
                "place": place,
                "trial": row.trial.number,
                "values": row.trial.values,
                name: row.value,
                "status": row.status,
                "rung": row.rung,
                "pack": None if row.result.error else str(row.trial.pack),
                **{k: v for k, v in vars(row.result).items() if k != "error"},
            }
            for place, row in enumerate(rows, 1)
        ],
    }


def table(sweep: Sweep) -> tuple[list[str], list[list[str]]]:
    """Return the columns of the leaderboard and its rows as texts."""
    rows = ranked(sweep)
    name = metric_of(sweep, rows[0].result)[0] if rows else sweep.metrics[0]
    header = ["place", "trial", *sweep.parameters, name, "batches", "pack MB", "time", "status"]
    lines = []
    for place, row in enumerate(rows, 1):
        result = row.result
        lines.append(
            [
                str(place),
                str(row.trial.number),
                *(value_text(row.trial.values[key]) for key in sweep.parameters),
                "" if row.value is None else f"{row.value:.4f}",
                f"{result.batches:,}" if result.batches else "",
                "" if result.pack_mb is None else f"{result.pack_mb:.2f}",
                "" if result.train_s is None else clock(result.train_s),
                row.status,
            ]
        )
    return header, lines


def text_table(sweep: Sweep) -> list[str]:
    """Return the leaderboard in lines of text, with columns that are aligned."""
    header, rows = table(sweep)
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *rows)
    ]


def csv_text(sweep: Sweep) -> str:
    """Return the leaderboard as CSV, with numbers in full."""
    content = to_json_rows(sweep)
    name, gates = content["metric"], list(MEANING)
    results = ["batches", "pack_mb", "train_s", "peak_gb"]
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["place", "trial", *sweep.parameters, name, *results, *gates, "status", "pack"])
    for row in content["rows"]:
        values = [(row["gates"] or {}).get(gate, {}).get("value") for gate in gates]
        writer.writerow(
            [row["place"], row["trial"], *(row["values"][key] for key in sweep.parameters)]
            + [row[name], *(row[key] for key in results), *values, row["status"], row["pack"]]
        )
    return file.getvalue()


def page(sweep: Sweep) -> str:
    """Return the leaderboard as a page of HTML, with a plot for each parameter."""
    rows = ranked(sweep)
    header, texts = table(sweep)
    name = metric_of(sweep, rows[0].result)[0] if rows else sweep.metrics[0]
    best = best_of(rows)
    entries = [
        Entry(row.trial.number, row.trial.values, row.value, _kind(row, best, sweep))
        for row in rows
        if row.value is not None
    ]
    axes = [
        Axis(key, p.values and [*map(value_text, p.values)], p.is_log)
        for key, p in sweep.parameters.items()
    ]
    direction = "lower" if is_lower_better(name) else "higher"
    figures = [
        ("Best " + name, "none" if best is None else f"{best.value:.4g}"),
        ("Best trial", "none" if best is None else str(best.trial.number)),
        ("Trials", f"{len(rows)} of {len(sweep.trials)}"),
        ("Passed", str(sum(row.status == "ok" for row in rows))),
    ]
    note = f"{sweep.config.search} search · {name} on held-out examples ({direction} is better)"
    return render(Leaderboard(sweep.name, note, name, figures, axes, entries, header, texts))


def _kind(row: Row, best: Row | None, sweep: Sweep) -> str:
    """Return how a trial is drawn."""
    if best is not None and row.trial.number == best.trial.number:
        return "best"
    if row.status != "ok":
        return "failed"
    return "finished" if row.rung == len(sweep.rungs.batches) - 1 else "stopped"


def write_leaderboard(sweep: Sweep) -> Path:
    """Write the leaderboard into the folder of a sweep, and return its page."""
    for suffix, content in (
        ("json", to_json(to_json_rows(sweep))),
        ("csv", csv_text(sweep)),
        ("html", page(sweep)),
    ):
        atomic_write(sweep.folder / f"{NAME}.{suffix}", content)
    return sweep.folder / f"{NAME}.html"
