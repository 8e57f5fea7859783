"""When a phase of a run reports, validates and saves."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LoopSettings:
    """When the loop does what; numbers are of batches."""

    start: int  # of the run, before the phase
    iters: int  # of the phase
    run_iters: int  # of the whole run
    grad_accumulation_steps: int  # that one update is made of
    steps_per_report: int
    steps_per_eval: int
    save_every: int
    picks_best: bool  # whether validations find the best weights, which then have a checkpoint
    best_by: str | None  # the entry of a validation that they are found by; None is its value
    clear_cache_threshold: int | None  # bytes that MLX may hold for reuse


class Due:
    """What is to be done after a batch.

    A checkpoint, and a validation that may find the best weights, wait for the end of an update.
    """

    def __init__(self, settings: LoopSettings, validates: bool) -> None:
        self._settings = settings
        self._validates = validates
        self._score = False  # whether a validation waits
        self.report = self.validate = self.save = False

    @property
    def anything(self) -> bool:
        """Whether all steps must be over first."""
        return self.report or self.validate or self.save

    def after(self, number: int, in_update: bool) -> None:
        """Decide it for a batch of the phase; ``in_update``: whether its update waits for more."""
        settings = self._settings
        ends = number == settings.iters
        self.report = ends or number % settings.steps_per_report == 0
        self.save = self.save or ends or number % settings.save_every == 0

        self._score = self._score or number % settings.steps_per_eval == 0
        if settings.picks_best:
            self.validate = self._validates and not in_update and (self._score or ends)
            self._score = self._score and not self.validate
        else:
            self.validate = self._validates and self._score and not ends
            self._score = False
