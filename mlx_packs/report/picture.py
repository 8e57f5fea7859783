"""The loss curve as a picture, by matplotlib where it is installed."""

import importlib.util
import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import PackError
from ..files import atomic_write
from .facts import Points, thinned

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NAMES = {"loss": "training loss", "valid_loss": "validation loss"}
_COLOURS = {"loss": "#2b63c6", "valid_loss": "#b4490f"}


def is_installed() -> bool:
    """Return whether pictures can be drawn; matplotlib is not imported."""
    return importlib.util.find_spec("matplotlib") is not None


def current_axes() -> "Axes":
    """Return the axes that pyplot draws on.

    Raises:
        PackError: matplotlib is not installed.
    """
    try:
        import matplotlib.pyplot as plt
    except ModuleNotFoundError:
        raise PackError(
            "plot: matplotlib is not installed. Run `pip install 'mlx-packs[plot]'`.",
            "dependency",
        ) from None
    return plt.gca()


def draw(axes: "Axes", curve: Mapping[str, Points], label: str) -> None:
    """Draw training and validation loss over batches; ``label`` is that of the losses."""
    for name, style in (("loss", "-"), ("valid_loss", "o-")):
        if series := thinned(curve.get(name, []), 2000):
            xs, ys = zip(*series, strict=True)
            axes.plot(xs, ys, style, label=_NAMES[name], color=_COLOURS[name], markersize=4)
    axes.set_xlabel("batch")
    axes.set_ylabel(label)
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
