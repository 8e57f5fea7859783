"""The leaderboard of a sweep as files: JSON, and from it a table and a page.

Plots of the page are the geometry that the template of charts draws.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..display import clock
from ..errors import PackError
from ..files import atomic_write, to_json
from ..reading import read_json
from ..report.page import Chart, drawn, environment, shown, ticks
from ..training.run_page import page_file

_MOST_LABEL = 14  # characters of the name of a value
# Kinds of dots: the name of each, and the class of the style sheet that it is drawn with.
_KINDS = {
    "best": ("best", "valid"),
    "finished": ("trained to the end", "train"),
    "failed": ("a gate failed", "failed"),
}
_SIZE = (520, 300)
FILE = "leaderboard.json"


def value_text(value: Any) -> str:
    """Return a value of a parameter as text: a float without zeros at its end."""
    return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Axis:
    """The horizontal axis of a plot.

    Attributes:
        name: of the parameter.
        names: of its values where they are listed, in their order; None for a range of numbers.
        is_log: whether equal ratios of numbers are equally far apart.
    """

    name: str
    names: Sequence[str] | None = None
    is_log: bool = False

    def place(self, value: Any) -> float:
        """Return where a value is: a number, its logarithm, or its place among the names."""
        if self.names is not None:
            return float(self.names.index(value_text(value)))
        if self.is_log:
            return math.log10(value)
        return float(value)

    def ticks(self, low: float, high: float) -> list[tuple[float, str]]:
        if self.names is not None:
            return [(float(i), name[:_MOST_LABEL]) for i, name in enumerate(self.names)]
        if not self.is_log:
            return [(v, shown(v)) for v in ticks(low, high, 5)]

        factors = (1, 2, 5) if high - low < 2 else (1,)
        powers = range(math.floor(low), math.ceil(high) + 1)
        marks = [math.log10(factor) + power for power in powers for factor in factors]
        return [(m, shown(float(f"{10**m:.3g}"))) for m in marks if low - 1e-9 <= m <= high + 1e-9]


def scatter(
    axis: Axis,
    series: Mapping[tuple[str, str], Sequence[tuple[Any, float, str]]],
    y_label: str,
    size: tuple[int, int],
) -> Chart | None:
    """Return a plot of dots; None without any.

    ``series`` has, by name and kind (a class of the style sheet): value of the parameter, metric,
    and what the dot is in words. ``size`` is width and height of the viewBox.
    """
    placed = {
        key: [(axis.place(value), metric, words) for value, metric, words in dots]
        for key, dots in series.items()
        if dots
    }
    if not placed:
        return None

    bounds = [_bounds([dot[i] for dots in placed.values() for dot in dots]) for i in (0, 1)]
    y_ticks = [(v, shown(v)) for v in ticks(*bounds[1], 4)]
    label = f"{axis.name} (log scale)" if axis.is_log else axis.name
    labels = (label, y_label)
    return drawn(placed, size, labels, bounds, lambda _: axis.ticks(*bounds[0]), y_ticks)


def _bounds(values: Sequence[float]) -> tuple[float, float]:
    low = min(values)
    high = max(values)
    margin = 0.08 * (high - low) or 0.05 * abs(high) or 1.0
    return low - margin, high + margin


def write_leaderboard(folder: Path, content: Mapping[str, Any]) -> None:
    """Write the leaderboard of `Sweep.leaderboard` as JSON and a page."""
    file = folder / FILE
    atomic_write(file, to_json(content))
    atomic_write(file.with_suffix(".html"), page(content))


def write_page(folder: Path, out: str | None = None) -> Path:
    """Write the page of a folder's leaderboard, return its file; a PackError if it is damaged."""
    file = folder / FILE
    try:
        text = page(read_json(file))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise PackError(f"{file}: is no leaderboard ({error!r}).", "unreadable") from None

    target = page_file(out or file.with_suffix(".html"))
    atomic_write(target, text)
    return target


def table(content: Mapping) -> list[list[str]]:
    metric = content["metric"]
    axes = _axes(content)
    lines = [["place", "trial", *axes, metric, "batches", "pack MB", "time", "status"]]

    for row in content["rows"]:
        values = [value_text(row["values"][key]) for key in axes]
        seconds = clock(row["train_s"]) if row["train_s"] is not None else ""
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


def page(content: Mapping) -> str:
    """Return the page as HTML: one file, no script, nothing from elsewhere."""
    metric = content["metric"]
    rows = content["rows"]
    best = rows[0] if content["best"] is not None else None
    figures = [
        ("Best " + metric, f"{best[metric]:.4g}" if best else "none"),
        ("Best trial", str(best["trial"]) if best else "none"),
        ("Trials", f"{len(rows)} of {content['trials']}"),
        ("Passed", str(sum(row["status"] == "ok" for row in rows))),
    ]

    by_kind: dict[str, list[Mapping]] = {kind: [] for kind in _KINDS}
    for row in rows:
        if row[metric] is not None:
            by_kind[_kind(row, content)].append(row)

    direction = "lower" if content["lower_is_better"] else "higher"
    note = f"{content['search']} search · {metric} on held-out examples ({direction} is better)"
    header, *lines = table(content)
    template = environment().get_template("leaderboard.html.jinja")
    return template.render(
        title=content["name"],
        note=note,
        metric=metric,
        figures=figures,
        plots=[plot for axis in _axes(content).values() if (plot := _plot(by_kind, metric, axis))],
        legend=[_KINDS[kind] for kind, some in by_kind.items() if some],
        header=header,
        rows=lines,
    )


def _plot(by_kind: Mapping[str, Sequence[Mapping]], metric: str, axis: Axis) -> Chart | None:
    """Return the metric over one parameter; the best trial is drawn last, on top."""
    name = axis.name

    def words(row: Mapping) -> str:
        place = f"{name} {row['values'][name]}"
        return f"trial {row['trial']}: {place}, {metric} {shown(row[metric])}"

    series = {
        _KINDS[kind]: [(row["values"][name], row[metric], words(row)) for row in by_kind[kind]]
        for kind in reversed(_KINDS)
    }
    return scatter(axis, series, metric, _SIZE)


def _axes(content: Mapping) -> dict[str, Axis]:
    return {
        key: Axis(key, axis["values"] and [*map(value_text, axis["values"])], axis["log"])
        for key, axis in content["axes"].items()
    }


def _kind(row: Mapping, content: Mapping) -> str:
    if row["pack"] is not None and row["pack"] == content["best"]:
        return "best"
    if row["status"] != "ok":
        return "failed"
    return "finished"
