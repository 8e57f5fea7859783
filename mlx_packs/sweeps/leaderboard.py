"""The leaderboard of a sweep as files: JSON, and from it a table, a CSV file and a page."""

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..display import clock
from ..errors import PackError
from ..files import atomic_write, to_json
from ..gates import MEANING
from ..reading import read_json
from ..report.leaderboard import Axis, Entry, Leaderboard, render, value_text

FILE = "leaderboard.json"


def write_leaderboard(folder: Path, content: Mapping[str, Any]) -> None:
    """Write the leaderboard of `Sweep.leaderboard` as JSON, CSV and a page."""
    file = folder / FILE
    atomic_write(file, to_json(content))
    atomic_write(file.with_suffix(".csv"), csv_text(content))
    atomic_write(file.with_suffix(".html"), page(content))


def write_page(folder: Path, out: str | None = None) -> Path:
    """Write the page of a folder's leaderboard, return its file; a PackError if it is damaged."""
    file = folder / FILE
    try:
        text = page(read_json(file))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise PackError(f"{file}: is no leaderboard ({error!r}).", "unreadable") from None

    target = file.with_suffix(".html")
    if out:
        target = Path(out).expanduser()
    if target.is_dir():
        raise PackError(f"--out {target}: is a folder. Name a file.", "exists")

    atomic_write(target, text)
    return target


def table(content: Mapping) -> list[list[str]]:
    metric = content["metric"]
    axes = _axes(content)
    lines = [["place", "trial", *axes, metric, "batches", "pack MB", "time", "status"]]

    for row in content["rows"]:
        values = [value_text(row["values"][key]) for key in axes]
        seconds = ""
        if row["train_s"] is not None:
            seconds = clock(row["train_s"])
        forms = {metric: ".4f", "batches": ",", "pack_mb": ".2f"}
        shown = ["" if row[k] is None else format(row[k], form) for k, form in forms.items()]

        lines.append(
            [str(row["place"]), str(row["trial"]), *values, *shown, seconds, row["status"]]
        )

    return lines


def text_table(content: Mapping) -> list[str]:
    lines = table(content)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]


def csv_text(content: Mapping) -> str:
    """Return a leaderboard as CSV, with numbers in full."""
    results = (content["metric"], "batches", "pack_mb", "train_s", "peak_gb", *MEANING)
    columns = ["place", "trial", *_axes(content), *results, "status", "pack"]
    file = io.StringIO()
    writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()

    for row in content["rows"]:
        gates = {name: gate["value"] for name, gate in (row["gates"] or {}).items()}
        writer.writerow({**row["values"], **gates, **row})

    return file.getvalue()


def page(content: Mapping) -> str:
    metric = content["metric"]
    rows = content["rows"]
    best_value = best_trial = "none"
    if content["best"] is not None:
        best_value = f"{rows[0][metric]:.4g}"
        best_trial = str(rows[0]["trial"])

    entries = [
        Entry(row["trial"], row["values"], row[metric], _kind(row, content))
        for row in rows
        if row[metric] is not None
    ]

    figures = [
        ("Best " + metric, best_value),
        ("Best trial", best_trial),
        ("Trials", f"{len(rows)} of {content['trials']}"),
        ("Passed", str(sum(row["status"] == "ok" for row in rows))),
    ]

    direction = "lower" if content["lower_is_better"] else "higher"
    note = f"{content['search']} search · {metric} on held-out examples ({direction} is better)"
    name = content.get("name") or Path(content["sweep"]).name
    axes = [*_axes(content).values()]
    header, *lines = table(content)
    return render(Leaderboard(name, note, metric, figures, axes, entries, header, lines))


def _axes(content: Mapping) -> dict[str, Axis]:
    """Return the axes of the plots; leaderboards of older versions have only values."""
    if "axes" in content:
        return {
            key: Axis(key, axis["values"] and [*map(value_text, axis["values"])], axis["log"])
            for key, axis in content["axes"].items()
        }

    rows = content["rows"]
    if not rows:
        return {}

    axes = {}
    for key in rows[0]["values"]:
        values = [row["values"][key] for row in rows]
        names = None
        if any(type(value) not in (int, float) for value in values):
            names = [*dict.fromkeys(map(value_text, values))]
        axes[key] = Axis(key, names)
    return axes


def _kind(row: Mapping, content: Mapping) -> str:
    if row["pack"] is not None and row["pack"] == content["best"]:
        return "best"
    if row["status"] != "ok":
        return "failed"
    last = content.get("rungs", 1 + max(each["rung"] for each in content["rows"])) - 1
    return "finished" if row["rung"] == last else "stopped"
