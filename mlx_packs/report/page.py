"""The page of a run or a pack: one file of HTML without anything from outside, and no script.

Every text is escaped by the template engine; the page also forbids browsers to load or run
anything, should a text ever pass for more than text.

Charts are geometry, in coordinates of their viewBox, which a template draws as SVG. A chart is
drawn twice, wide and narrow, and the page shows the one that fits: text keeps its size on a phone.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ..display import clock, size
from ..terminal import printable_text
from .facts import Page, Points, extremes, progress_series, rate_name, thinned

if TYPE_CHECKING:
    from jinja2 import Environment

_WIDE = (1040, 330)
_NARROW = (360, 260)
_SMALL = (340, 150)
_LABEL = 7.2  # width of a character of a label
_MOST_DOTS = 40  # of a line
_TABLE_ROWS = 40  # of a series


@dataclass(frozen=True)
class Line:
    """A series of a chart.

    Attributes:
        kind: classes of the style sheet: train, valid, other.
        path: points of a polyline.
        dots: where each of a few points is, and what it is in words.
    """

    name: str
    kind: str
    path: str
    dots: Sequence[tuple[float, float, str]] = ()


@dataclass(frozen=True)
class Chart:
    """Lines over batches: its box, grid and series."""

    width: int
    height: int
    left: float
    right: float
    top: float
    bottom: float
    x_ticks: Sequence[tuple[float, str]]
    y_ticks: Sequence[tuple[float, str]]
    lines: Sequence[Line]
    y_label: str
    mark: tuple[float, str] | None = None  # a vertical line and its label


@cache
def environment(*folders: Path) -> "Environment":
    """Return the template engine, which escapes every text.

    Templates of ``folders`` may include those of this package.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader([*folders, Path(__file__).parent / "templates"]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printable,
    )

    environment.filters["shown"] = shown
    environment.globals.update(size=size, clock=clock)
    return environment


def _printable(value: object) -> object:
    """Return a plain text without what could steer a terminal; other values stay."""
    if type(value) is not str:
        return value
    return printable_text(value)


def render(facts: Page) -> str:
    mark = (facts.best, "best") if facts.best is not None else None

    template = environment().get_template("page.html.jinja")
    return template.render(
        facts=facts,
        wide=_progress(facts, _WIDE, mark),
        narrow=_progress(facts, _NARROW, mark),
        points=table_of(facts.curve),
        small=[
            (title, small)
            for title, name in (
                ("Learning rate", "learning_rate"),
                ("Gradient norm", "grad_norm"),
                (rate_name(facts.unit), "rate"),
            )
            if (small := chart({(title, "other"): facts.curve.get(name, [])}, "", _SMALL))
        ],
    )


def table_of(curve: Mapping[str, Points]) -> list[tuple[str, str, str]]:
    """Return batch, training and validation loss (or reward) of some points as texts."""
    series = [dict(extremes(curve.get(key, []), _TABLE_ROWS)) for key in progress_series(curve)]
    batches = sorted({batch for points in series for batch in points})
    texts = [{batch: shown(value) for batch, value in points.items()} for points in series]
    return [(f"{b:,.0f}", *(values.get(b, "–") for values in texts)) for b in batches]


def render_fragment(facts: Page) -> str:
    """Return the view for a notebook: figures, results and the loss curve, without a page."""
    template = environment().get_template("fragment.html.jinja")
    return template.render(facts=facts, curve=_progress(facts, (640, 240), None))


def _progress(facts: Page, size: tuple[int, int], mark: tuple[float, str] | None) -> Chart | None:
    training, validation = progress_series(facts.curve)
    series = {
        (f"training {training}", "train"): facts.curve.get(training, []),
        (f"validation {training}", "valid"): facts.curve.get(validation, []),
    }
    label = facts.loss_name if training == "loss" else training
    return chart(series, label, size, mark)


def ticks(low: float, high: float, count: int, least: float = 0.0) -> list[float]:
    """Return about ``count`` numbers (1, 2 or 5 times a power of ten), ``least`` apart or more."""
    if not high > low:
        return [low]

    step = 10 ** math.floor(math.log10((high - low) / count))
    step *= min((1, 2, 5, 10), key=lambda factor: abs((high - low) / (step * factor) - count))
    step = max(step, least)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def shown(value: float) -> str:
    """Return a number of three or four digits that count: 4.25, 1,250, 2e-05."""
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 1e6 or size < 1e-3:
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    if size >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _around(series: Sequence[Points]) -> tuple[float, float]:
    """Return bounds of the values with a margin, at 0 where that is near.

    They are at least 2 % apart: a flat curve then looks flat.
    """
    values = [y for points in series for _, y in points]
    low = min(values)
    high = max(values)
    margin = max(0.06 * (high - low), 0.01 * abs(high)) or 1.0
    if 0 <= low < 0.25 * high:
        return 0.0, high + margin
    return low - margin, high + margin


def chart(
    series: Mapping[tuple[str, str], Points],
    y_label: str,
    size: tuple[int, int],
    mark: tuple[float, str] | None = None,
) -> Chart | None:
    """Return a chart of series by (name, kind); None without a line to draw.

    ``size`` is width and height of the viewBox. ``mark`` is a batch, at which there is a vertical
    line, and its label.
    """
    usable = {key: thinned(points) for key, points in series.items() if points}
    if not any(len(points) > 1 for points in usable.values()):
        return None

    batches = [batch for points in usable.values() for batch, _ in points]
    first = min(batches)
    last = max(batches)
    low, high = _around(list(usable.values()))
    y_values = ticks(low, high, 5 if size[1] > 180 else 3)
    y_labels = [f"{value:,.6g}" for value in y_values]

    width, height = size
    left = 14 + _LABEL * max(map(len, y_labels))
    right = width - 14
    top = 34 if y_label or mark else 8
    bottom = height - 40

    def x(value: float) -> float:
        return round(left + (value - first) / ((last - first) or 1) * (right - left), 1)

    def y(value: float) -> float:
        return round(bottom - (value - low) / (high - low) * (bottom - top), 1)

    lines = []
    for (name, kind), points in usable.items():
        path = " ".join(f"{x(batch)},{y(value)}" for batch, value in points)
        dots = []
        if len(points) <= _MOST_DOTS:
            dots = [(x(b), y(v), f"batch {b:,.0f}: {name} {shown(v)}") for b, v in points]
        lines.append(Line(name, kind, path, dots))

    x_values = ticks(first, last, max(2, round((right - left) / 90)), least=1)
    return Chart(
        *size,
        *(left, right, top, bottom),
        [(x(value), f"{value:,.6g}") for value in x_values],
        list(zip(map(y, y_values), y_labels, strict=True)),
        lines,
        y_label,
        (x(mark[0]), mark[1]) if mark and first <= mark[0] <= last else None,
    )
