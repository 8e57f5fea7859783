"""Charts as geometry: a template draws them as SVG, so that what is text is escaped there.

Coordinates are those of the viewBox. A chart is drawn twice, wide and narrow, and the page shows
the one that fits: text keeps its size on a phone.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .. import display
from ..terminal import with_error
from .facts import MetricChange, Points, thinned

_LABEL = 7.2  # width of a character of a label


@dataclass(frozen=True)
class Tick:
    at: float
    label: str


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
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    lines: Sequence[Line]
    x_label: str
    y_label: str
    mark: tuple[float, str] | None = None  # a vertical line and its label


@dataclass(frozen=True)
class Bar:
    """A horizontal bar: its length, and the ends of its error, as shares of the axis."""

    name: str
    kind: str
    share: float
    label: str
    error: tuple[float, float] | None = None


def ticks(low: float, high: float, count: int, least: float = 0.0) -> list[float]:
    """Return about so many round numbers (1, 2 or 5 times a power of ten) from low to high.

    They are at least ``least`` apart.
    """
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
        return _scientific(value)
    if size >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _scientific(value: float) -> str:
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def _labels(values: Sequence[float]) -> list[str]:
    """Return ticks as text, all with the same decimals."""
    steps = [b - a for a, b in zip(values, values[1:], strict=False)] or [abs(values[0]) or 1]
    step = min(steps)
    most = max(map(abs, values))

    if most >= 1e6 or 0 < most < 1e-2:
        return [_scientific(value) if value else "0" for value in values]
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return [f"{value:,.{decimals}f}" for value in values]


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

    all_points = list(usable.values())
    low, high = _around(all_points)
    first = min(points[0][0] for points in all_points)
    last = max(points[-1][0] for points in all_points)

    width, height = size
    y_values = ticks(low, high, 5 if height > 180 else 3)
    y_labels = _labels(y_values)
    left = 14 + _LABEL * max(map(len, y_labels))
    right = width - 14
    top = 34 if y_label or mark else 8
    bottom = height - 40
    x_values = ticks(first, last, max(2, round((right - left) / 90)), least=1)

    def x(value: float) -> float:
        return round(left + (value - first) / ((last - first) or 1) * (right - left), 1)

    def y(value: float) -> float:
        return round(bottom - (value - low) / (high - low) * (bottom - top), 1)

    def path_of(points: Points) -> str:
        return " ".join(f"{x(batch)},{y(value)}" for batch, value in points)

    lines = []
    for (name, kind), points in usable.items():
        dots = ()
        if len(points) <= 40:
            dots = [(x(b), y(v), f"batch {b:,.0f}: {name} {shown(v)}") for b, v in points]
        lines.append(Line(name, kind, path_of(points), dots))

    line = (x(mark[0]), mark[1]) if mark and first <= mark[0] <= last else None
    x_labels = _labels(x_values)
    return Chart(
        *size,
        *(left, right, top, bottom),
        [Tick(x(v), text) for v, text in zip(x_values, x_labels, strict=True)],
        [Tick(y(v), text) for v, text in zip(y_values, y_labels, strict=True)],
        lines,
        "batch",
        y_label,
        line,
    )


def change_bars(change: MetricChange) -> list[Bar]:
    """Return a bar before and one after with their errors, from 0 to the larger."""
    values = (("before", change.before, change.before_error),)
    values += (("after", change.after, change.after_error),)
    most = max(abs(value) + (error or 0) for _, value, error in values) or 1.0
    digits = 3 if most < 2 else 2

    bars = []
    for name, value, error in values:
        label = with_error(value, error, f".{digits}f")
        ends = None
        if error is not None:
            ends = (max(0.0, value - error) / most, (value + error) / most)
        bars.append(Bar(name, name, max(0.0, value) / most, label, ends))
    return bars


def memory_bars(gigabytes: Sequence[tuple[str, float]]) -> list[Bar]:
    """Return a bar for each amount of memory, from 0 to the largest."""
    most = max((amount for _, amount in gigabytes), default=0) or 1.0
    kinds = {"planned": "before", "measured": "after"}
    return [
        Bar(name, kinds.get(name.split()[0], "other"), amount / most, display.size(amount * 1e9))
        for name, amount in gigabytes
    ]
