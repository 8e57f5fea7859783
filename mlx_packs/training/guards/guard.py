"""The interface between the training loop and what watches over what the run depends on."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...objectives.objective import Objective
from ..micro_batches import MicroBatches
from ..observer import Observer
from ..settings import Run


@dataclass(frozen=True)
class Guarded:
    """The arguments from which guards are created."""

    run: Run
    identity: dict  # of the run, as config.json has it
    curve: list[dict]  # the lines of metrics.jsonl so far
    objective: Objective
    observers: Sequence[Observer] = ()
    micro_batches: MicroBatches = field(default_factory=MicroBatches)


class Guard:
    """Watches over a run; a subclass overrides what it needs."""

    def between_batches(self, batch: Any, number: int) -> str | None:
        """Return why the run should be saved and end after batch ``number``; None to go on."""

    def before_checkpoint(self, nbytes: int) -> None:
        """Raise a PackError where a checkpoint of so many bytes cannot be written."""

    def at_end(self) -> None:
        """Raise a PackError where the run cannot be resumed although its pack is saved."""
