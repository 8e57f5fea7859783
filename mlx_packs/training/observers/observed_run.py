"""The facts of a run that its observers need."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..settings import Run


@dataclass(frozen=True)
class ObservedRun:
    """The facts of a run that observers are created from."""

    run: Run
    unit: str  # what the run counts: tokens, pairs
    recipe: dict  # its configuration as in config.json
    curve: list[dict] = field(default_factory=list)  # the lines of metrics.jsonl so far
    masks: Sequence[dict] = ()  # some training examples, as `data.token_store` has them
