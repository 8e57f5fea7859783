"""The result of a training run."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ..packs.pack import Pack

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass
class TrainRun:
    """Result of a training run.

    Attributes:
        pack: the pack.
        run: the run folder.
        report: what was measured, as ``packs train --json`` prints it.
        curve: the lines of metrics.jsonl.
    """

    pack: Pack
    run: Path
    report: dict
    curve: list[dict] = field(default_factory=list)

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draw the loss curve (needs matplotlib) and return its axes."""
        import matplotlib.pyplot as plt

        ax = ax or plt.gca()
        for key, style in (("loss", "-"), ("valid_loss", "o-")):
            points = [(line["batch"], line[key]) for line in self.curve if key in line]
            if points:
                ax.plot(*zip(*points, strict=True), style, label=key.replace("_", " "))
        ax.set_xlabel("batch")
        ax.set_ylabel("loss" if "loss" in self.report else "loss (nats a token)")
        ax.legend()
        return ax

    def to_json(self) -> dict:
        """Return the report."""
        return self.report
