"""Plots for the documentation, as PNG files of one style."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

IMAGES = Path(__file__).parent / "images"


@contextmanager
def saved(file: Path, rows: int = 1, columns: int = 1, height: float = 2.5) -> Iterator[list]:
    """Axes to draw on, row by row, of so many inches; the file is written on leaving.

    Needs matplotlib, but no screen.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 + 4.5 * columns, 1.5 + height * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.25)
    yield axes
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
