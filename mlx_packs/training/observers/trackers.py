"""Experiment trackers: mlx-lm's own reporters for wandb and swanlab, and one more of that form."""

import importlib.util
from collections.abc import Sequence
from typing import Any

from ...errors import PackError, reason_of
from ...objectives.score import Score
from ..observer import Observer
from ..settings import Run
from . import ObservedRun

# What each tracker needs to be installed, by its name.
PACKAGES = {
    "tensorboard": "tensorboardX",
    "wandb": "wandb",
    "swanlab": "swanlab",
}
_INSTEAD = {"none": " Leave it out.", "trackio": " Use tensorboard."}


class TensorBoard:
    """Writes event files into ``tensorboard`` of the run folder; TensorBoard itself reads them."""

    def __init__(self, run: Run) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(run.folder / "tensorboard"))

    def on_train_loss_report(self, train_info: dict) -> None:
        self._write("train", train_info)

    def on_val_loss_report(self, val_info: dict) -> None:
        self._write("valid", val_info)

    def close(self) -> None:
        self._writer.close()

    def _write(self, group: str, info: dict) -> None:
        for name, value in info.items():
            if name != "iteration":
                self._writer.add_scalar(f"{group}/{name}", value, info["iteration"])
        self._writer.flush()


def check_report_to(report_to: str | None, project: str | None) -> None:
    """Check before anything is loaded that the trackers are known and installed."""
    if project is not None and not report_to:
        raise PackError(
            "--project-name: belongs to an experiment tracker. Pass --report-to too.", "conflict"
        )

    for name in _names(report_to):
        if name not in PACKAGES:
            text = f"must be of {', '.join(PACKAGES)}, but got '{name}'."
            text += _INSTEAD.get(name, "")
            raise PackError(f"--report-to {report_to}: {text}", "unknown")
        if not _is_installed(name):
            raise PackError(
                f"--report-to {report_to}: {name} is not installed. Run "
                f"`pip install {PACKAGES[name]}`.",
                "dependency",
            )


def _names(report_to: str | None) -> list[str]:
    return [part.strip().lower() for part in (report_to or "").split(",") if part.strip()]


def _is_installed(name: str) -> bool:
    from mlx_lm.tuner import callbacks

    if name in callbacks.SUPPORT_CALLBACK:
        return getattr(callbacks, name) is not None
    return importlib.util.find_spec(PACKAGES[name]) is not None


class Trackers(Observer):
    """Reports the numbers that mlx-lm's trainer reports, under its names."""

    def __init__(self, callbacks: Sequence[Any], unit: str) -> None:
        self._callbacks = callbacks
        self._unit = unit

    @classmethod
    def of(cls, observed: ObservedRun) -> "Trackers | None":
        """Return the trackers of ``--report-to``; None without any."""
        names = _names(observed.run.request.option("report_to"))
        if not names:
            return None
        return cls([_tracker(name, observed) for name in names], observed.unit)

    def on_report(self, line: dict, batches_per_s: float) -> None:
        info = {
            "iteration": line["batch"],
            "train_loss": line["loss"],
            "learning_rate": line["learning_rate"],
            "iterations_per_second": batches_per_s,
            f"{self._unit}_per_second": line[f"{self._unit}_per_s"],
            f"trained_{self._unit}": line[f"trained_{self._unit}"],
            "peak_memory": line["peak_gb"],
        }

        for callback in self._callbacks:
            callback.on_train_loss_report(info)

    def on_validation(self, line: dict, score: Score, seconds: float) -> None:
        """Report what was measured, by mlx-lm's names: ``val_loss``."""
        info = {"iteration": line["batch"], "val_time": seconds}
        for name, value in score.entries.items():
            info[f"val_{name.removeprefix('valid_')}"] = value

        for callback in self._callbacks:
            callback.on_val_loss_report(info)

    def on_end(self, report: dict) -> None:
        """Finish the trackers that ask for it; the others finish with the process."""
        for callback in self._callbacks:
            if close := getattr(callback, "close", None):
                close()


def _tracker(name: str, observed: ObservedRun) -> Any:
    """Return the tracker of a name; what it cannot begin with is an error of ``--report-to``."""
    from mlx_lm.tuner.callbacks import get_reporting_callbacks

    run = observed.run
    try:
        if name == "tensorboard":
            return TensorBoard(run)
        return get_reporting_callbacks(
            name,
            project_name=run.request.option("project_name") or run.folder.name,
            log_dir=str(run.folder),
            config=observed.recipe,
        )
    except (ImportError, ValueError) as error:
        raise PackError(f"--report-to {name}: {reason_of(error)}.", "dependency") from None
