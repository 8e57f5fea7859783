"""The interface between the training loop and everything that reports on it."""

from pathlib import Path

from ...objectives.objective import Score


class Observer:
    """Follows a run; a subclass overrides the methods that it needs.

    An exception ends the run; its last checkpoint remains. Lines are JSON objects with the number
    of batches, ``batch``; in a run with phases they name theirs, ``phase``.

    Attributes:
        stop_reason: None; set it to a reason in words, and the run ends after this batch, with a
            pack. Not in runs with phases.
    """

    stop_reason: str | None = None

    def on_phase_start(self, batches: int, done: int) -> None:
        """A phase of this many batches begins, or continues after ``done`` of them."""

    def on_step(self, line: dict) -> None:
        """A batch was taken; ``line`` has its loss, the throughput, and the peak memory."""

    def on_report(self, line: dict, batches_per_s: float) -> None:
        """``steps_per_report`` batches were taken; ``line`` has their mean loss and more."""

    def on_validation(self, line: dict, score: Score, seconds: float) -> None:
        """The validation split was scored, in this many seconds; ``line`` logs the score."""

    def on_event(self, line: dict) -> None:
        """An update was skipped, a learning rate lowered, a batch taken in pieces; ``line`` logs it."""

    def on_checkpoint(self, folder: Path) -> None:
        """A checkpoint is complete."""

    def on_phase_end(self) -> None:
        """The batches of a phase are over, or an error or an interruption ended them."""

    def on_held_out(self, line: dict) -> None:
        """The held-out examples of all phases were scored after a phase that is not the last."""

    def on_end(self, report: dict) -> None:
        """The pack is saved; ``report`` is the result of the run as ``--json`` prints it."""
