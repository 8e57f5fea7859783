"""The interface between the training loop and everything that reports on it."""

from pathlib import Path

from ..objectives.score import Score


class Observer:
    """Receives the events of a run; a subclass overrides the methods that it needs.

    An exception in a method ends the run; the last checkpoint remains. Every ``line`` is a JSON
    object with the number of batches so far as ``batch``; in a run with phases it names its
    ``phase`` too.

    Attributes:
        stop_reason: None. If a method sets it to a reason in words, the run ends after the current
            batch and writes its pack. Runs with phases do not support it.
    """

    stop_reason: str | None = None

    def on_phase_start(self, batches: int, done: int) -> None:
        """Called before the first batch of a phase, or of a run without phases.

        Args:
            batches: Number of batches of the phase.
            done: Number of its batches that a resumed run took before.
        """

    def on_step(self, line: dict) -> None:
        """Called after each batch; ``line`` has its loss, the throughput and the peak memory."""

    def on_report(self, line: dict, batches_per_s: float) -> None:
        """Called every ``steps_per_report`` batches; ``line`` has their mean loss and more."""

    def on_validation(self, line: dict, score: Score, seconds: float) -> None:
        """Called after each evaluation on the validation examples.

        Args:
            line: The line that logs the score.
            score: The score; ``score.value`` is the number that runs are compared by, of most
                tasks the mean loss per target (``score.nll``).
            seconds: Duration of the evaluation.
        """

    def on_event(self, line: dict) -> None:
        """Called after a fault that skips an update or ends the run, or a batch taken in pieces."""

    def on_checkpoint(self, folder: Path) -> None:
        """Called after a checkpoint was written completely to ``folder``."""

    def on_phase_end(self) -> None:
        """Called after the last batch of a phase, and when an error or an interruption ends it."""

    def on_held_out(self, line: dict) -> None:
        """Called after each phase but the last; ``line`` has the held-out scores of all phases."""

    def on_end(self, report: dict) -> None:
        """Called after the pack was saved; ``report`` is the output of `packs train --json`."""
