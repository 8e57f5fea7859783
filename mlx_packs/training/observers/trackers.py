"""Experiment trackers, through mlx-lm's own reporters for wandb and swanlab."""

from typing import TYPE_CHECKING

from ...errors import PackError
from ...objectives.objective import Score
from .observer import ObservedRun, Observer

if TYPE_CHECKING:
    from mlx_lm.tuner.callbacks import TrainingCallback


def check_report_to(report_to: str | None, project: str | None) -> None:
    """Check before anything is loaded that the trackers are known and installed."""
    if project is not None and not report_to:
        raise PackError(
            "--project-name: belongs to an experiment tracker. Pass --report-to too.", "conflict"
        )
    if report_to is None:
        return
    from mlx_lm.tuner import callbacks

    for name in (part.strip().lower() for part in report_to.split(",") if part.strip()):
        if name not in callbacks.SUPPORT_CALLBACK:
            known = ", ".join(callbacks.SUPPORT_CALLBACK)
            raise PackError(
                f"--report-to {report_to}: must be of {known}, but got '{name}'.", "unknown"
            )
        if getattr(callbacks, name) is None:
            raise PackError(
                f"--report-to {report_to}: is not installed. Run `pip install {name}`.",
                "dependency",
            )


class Trackers(Observer):
    """Reports the numbers that mlx-lm's trainer reports, under its names."""

    def __init__(self, callback: "TrainingCallback", unit: str) -> None:
        self._callback = callback
        self._unit = unit

    @classmethod
    def of(cls, observed: ObservedRun) -> "Trackers | None":
        """Return the trackers of ``--report-to``; None without any."""
        run = observed.run
        if run.report_to is None:
            return None
        from mlx_lm.tuner.callbacks import get_reporting_callbacks

        try:
            callback = get_reporting_callbacks(
                run.report_to,
                project_name=run.project_name or run.folder.name,
                log_dir=str(run.folder),
                config=observed.recipe,
            )
        except (ImportError, ValueError) as error:
            raise PackError(f"--report-to {run.report_to}: {error}", "dependency") from None
        return cls(callback, observed.unit) if callback else None

    def on_report(self, line: dict, batches_per_s: float) -> None:
        """Report the training loss."""
        self._callback.on_train_loss_report(
            {
                "iteration": line["batch"],
                "train_loss": line["loss"],
                "learning_rate": line["learning_rate"],
                "iterations_per_second": batches_per_s,
                f"{self._unit}_per_second": line[f"{self._unit}_per_s"],
                f"trained_{self._unit}": line[f"trained_{self._unit}"],
                "peak_memory": line["peak_gb"],
            }
        )

    def on_validation(self, line: dict, score: Score, seconds: float) -> None:
        """Report the validation loss."""
        self._callback.on_val_loss_report(
            {"iteration": line["batch"], "val_loss": score.nll, "val_time": seconds}
        )
