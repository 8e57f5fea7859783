"""The result of a training run, as Python and notebooks show it."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import PackError
from ..ops import _backend
from ..packs.card import format_change
from ..packs.facts import notebook_html, report_html
from ..packs.manifest import task_of
from ..packs.pack import Pack
from ..report.facts import Points, curve_of, loss_name, progress_series, short_curve, thinned

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..memory.plan import MemoryChoice
    from .fit import Fit


# The keys of a report that come first, in this order, if it has them; the others follow by name.
_FIRST_KEYS = (
    "pack run task method steps batches first_loss last_loss ppl_before ppl_after ppl_before_se "
    "ppl_after_se held_out gates train_s tokens_per_s trained_tokens peak_gb process_peak_gb "
    "plan_peak_gb pack_mb trainable_parameters base_weights matmul_path recompute compute_dtype"
).split()
_LAST_KEYS = ("versions",)
_COLOURS = ("#2b63c6", "#b4490f")  # of training and validation


def measured(fit: "Fit", memory: "MemoryChoice") -> dict:
    """Return the part of a manifest that differs from run to run."""
    return {
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **fit.measured,
        "curve": short_curve(fit.curve),
        "plan_peak_gb": memory.peak_gb,
        "matmul_path": memory.choice.matmul_path,
        "matmul_path_ms": memory.choice.step_ms,
        "ops": _backend.record(),
    }


def in_order(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return a report with its keys in the order in which people read them."""
    first = [key for key in _FIRST_KEYS if key in report]
    last = [key for key in _LAST_KEYS if key in report]
    others = sorted(set(report) - {*first, *last})
    return {key: report[key] for key in (*first, *others, *last)}


def losses_of(curve: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the first and the last training loss of a run; nothing if it reported none."""
    losses = [line["loss"] for line in curve if isinstance(line.get("loss"), float)]
    if not losses:
        return {}
    return {"first_loss": losses[0], "last_loss": losses[-1]}


class RunReport(dict):
    """The measurements of a run, by name, as ``packs train --json`` prints them."""

    def __repr__(self) -> str:
        """Return the result and the number of updates in one line; ``dict(report)`` has all."""
        updates = f"{self.get('steps', 0):,} updates"
        held_out = self.get("held_out")
        if not held_out:
            return f"RunReport({updates})"

        change = format_change(self)
        examples = f"{held_out.get('rows')} {held_out.get('split')} examples"
        return f"RunReport({change} on {examples}, {updates})"

    def _repr_html_(self) -> str:
        name = Path(str(self.get("pack", "run"))).name
        return report_html(self, name)


@dataclass(repr=False)
class TrainRun:
    """The result of a training run.

    Attributes:
        pack: The pack.
        run: The run folder; `write_page` describes its ``report.html``.
        report: The results, as `packs train --json` prints them.
        curve: The lines of ``metrics.jsonl``.
    """

    pack: Pack
    run: Path
    report: dict
    curve: list[dict] = field(default_factory=list)

    def __repr__(self) -> str:
        """Return the pack, and the length of the run, in one line."""
        return f"TrainRun({self.pack!r}, {self.report['steps']:,} updates, run={str(self.run)!r})"

    def _repr_html_(self) -> str:
        name = Path(self.pack.name).name
        return notebook_html(self.pack.manifest, name, curve_of(self.curve))

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draw the loss curve with matplotlib and return its axes.

        Args:
            ax: Axes to draw on; by default the current ones.

        Raises:
            PackError: If matplotlib is not installed.
        """
        if ax is None:
            ax = _current_axes()

        label = loss_name(task_of(self.pack.manifest))
        if "loss" in self.report:  # of the caller's own loss, too
            label = "loss"
        _draw(ax, curve_of(self.curve), label)
        return ax

    def to_json(self) -> dict:
        """Return the report, as `packs train --json` prints it."""
        return self.report


def _current_axes() -> "Axes":
    """Return the axes that pyplot draws on; a PackError if matplotlib is not installed."""
    try:
        import matplotlib.pyplot as plt
    except ModuleNotFoundError:
        raise PackError(
            "plot: matplotlib is not installed. Run `pip install 'mlx-packs[plot]'`.",
            "dependency",
        ) from None
    return plt.gca()


def _draw(axes: "Axes", curve: Mapping[str, Points], loss_label: str) -> None:
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
