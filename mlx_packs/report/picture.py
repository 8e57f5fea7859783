"""The loss curve as a picture, by matplotlib where it is installed."""

import importlib.util
import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import PackError
from ..files import atomic_write
from .facts import Points, progress_series, thinned

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#2b63c6", "#b4490f")  # of training and validation


def is_installed() -> bool:
    """Return whether pictures can be drawn; matplotlib is not imported."""
    return importlib.util.find_spec("matplotlib") is not None


def current_axes() -> "Axes":
    """Return the axes that pyplot draws on; a PackError if matplotlib is not installed."""
    try:
        import matplotlib.pyplot as plt
    except ModuleNotFoundError:
        raise PackError(
            "plot: matplotlib is not installed. Run `pip install 'mlx-packs[plot]'`.",
            "dependency",
        ) from None
    return plt.gca()


def draw(axes: "Axes", curve: Mapping[str, Points], loss_label: str) -> None:
    """Draw the losses or rewards of a run over batches; ``loss_label`` is that of losses."""
    names = progress_series(curve)
    measure = names[0]
    labels = (f"training {measure}", f"validation {measure}")
    styles = ("-", "o-")
    for name, label, style, color in zip(names, labels, styles, _COLOURS, strict=True):
        if series := thinned(curve.get(name, []), 2000):
            xs, ys = zip(*series, strict=True)
            axes.plot(xs, ys, style, label=label, color=color, markersize=4)

    axes.set_xlabel("batch")
    axes.set_ylabel(loss_label if measure == "loss" else measure)
    if axes.lines:
        axes.legend(frameon=False)


def save_picture(curve: Mapping[str, Points], file: Path, title: str, label: str) -> None:
    """Write the curve as a PNG file, atomically. Needs matplotlib, but no screen."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), dpi=120)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.09, 0.13, 0.88, 0.77))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    draw(axes, curve, label)

    has_glyphs = all(" " <= character < "\u0590" for character in title)  # in matplotlib's own font
    shown = title if has_glyphs else ""
    # names are no formulas
    axes.set_title(shown, loc="left", parse_math=False, fontsize="medium", fontweight="bold")

    image = io.BytesIO()
    figure.savefig(image, format="png")
    atomic_write(file, image.getvalue())
