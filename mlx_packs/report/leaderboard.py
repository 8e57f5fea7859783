"""The page of a sweep: a plot of the metric over each parameter, and the table of its trials."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .chart import Chart, shown
from .page import environment
from .scatter import Axis, scatter

# Kinds of dots and the class of the style sheet that each is drawn with.
KINDS = {"best": "valid", "finished": "train", "stopped": "other", "failed": "failed"}
_NAMES = {
    "best": "best",
    "finished": "trained to the end",
    "stopped": "stopped at an earlier rung",
    "failed": "a gate failed",
}
_SIZE = (520, 300)


@dataclass(frozen=True)
class Entry:
    """A trial with a value of the metric; ``kind`` is a key of `KINDS`."""

    number: int
    values: Mapping[str, Any]
    value: float
    kind: str


@dataclass(frozen=True)
class Leaderboard:
    """The content of the page: plots of ``entries`` over ``axes``, and a table of all trials.

    Attributes:
        note: search and metric, in one line.
        figures: name and value of the headline figures.
        rows: cells of the table, the best trial first.
    """

    title: str
    note: str
    metric: str
    figures: Sequence[tuple[str, str]]
    axes: Sequence[Axis]
    entries: Sequence[Entry]
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def render(board: Leaderboard) -> str:
    """Return the page as HTML: one file, no script, nothing from elsewhere."""
    template = environment().get_template("leaderboard.html.jinja")
    kinds = [kind for kind in KINDS if any(entry.kind == kind for entry in board.entries)]

    return template.render(
        board=board,
        plots=[plot for axis in board.axes if (plot := _plot(board, axis))],
        legend=[(KINDS[kind], _NAMES[kind]) for kind in kinds],
    )


def _plot(board: Leaderboard, axis: Axis) -> Chart | None:
    """Return the metric over one parameter; the best trial is drawn last, on top."""
    series = {
        (_NAMES[kind], KINDS[kind]): [
            (
                entry.values[axis.name],
                entry.value,
                f"trial {entry.number}: {axis.name} {entry.values[axis.name]}, "
                f"{board.metric} {shown(entry.value)}",
            )
            for entry in board.entries
            if entry.kind == kind
        ]
        for kind in reversed(KINDS)
    }
    return scatter(axis, series, board.metric, _SIZE)
