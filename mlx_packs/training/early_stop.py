"""A run that ends before its last batch on purpose: patience, its time, or an observer's wish."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING

from ..display import clock
from ..errors import PackError, flag_of
from ..objectives.score import LOSS, Score, StoredScore, was_scored
from .observer import Observer

if TYPE_CHECKING:
    from ..config.schema import TrainConfig
    from ..data.rows import Splits

_CLEARLY = 0.01  # better, as a share of the score


@dataclass
class EarlyStop:
    """The best validation score of a run so far, and why it should end now."""

    # Validations without a better score that end the run; None for no limit.
    patience: int | None = None
    seconds: float | None = None  # that it trains for; None for no limit
    best_by: str | None = None  # the entry of a score that is compared; None is its value
    curve: Sequence[dict] = ()  # of metrics.jsonl; a resumed run continues with what it tells
    observers: Sequence[Observer] = ()  # of the run, each of which may end it
    batch: int = 0  # of the best score
    best: Score | None = None
    since: int = 0  # validations after it
    _started: float = field(default_factory=lambda: monotonic())

    def __post_init__(self) -> None:
        for line in self.curve:
            if was_scored(line):
                self._compare(line["batch"], StoredScore.of(line, self.best_by))

    def add(self, batch: int, score: Score) -> bool:
        """Record a validation score; return whether it is the best."""
        return self._compare(batch, score.by(self.best_by))

    def _compare(self, batch: int, score: Score | None) -> bool:
        """Compare a score with the best one; None is one that was not finite."""
        if score is not None and score.is_better_than(self.best):
            self.batch = batch
            self.best = score
            self.since = 0
            return True
        self.since += 1
        return False

    def reason(self) -> str | None:
        """Return why the run should end, in words; None to go on."""
        if self.patience is not None and self.since >= self.patience:
            times = "a validation"
            if self.patience > 1:
                times = f"{self.patience} validations"

            direction = "lower"
            measure = LOSS
            if self.best:
                measure = self.best.measure
                if self.best.higher_is_better:
                    direction = "higher"

            return f"no {direction} validation {measure} in {times}"

        if self.seconds is not None and monotonic() - self._started >= self.seconds:
            return f"it trained for {clock(self.seconds)} (--time)"

        for observer in self.observers:
            if reason := observer.stop_reason:
                return reason
        return None


def check_validated(train: "TrainConfig", splits: "Splits") -> None:
    """Raise a PackError if the best step is asked for, and there is nothing to find it by."""
    named = train.changed(("load_best", "patience"))
    if named and not len(splits.rows["valid"]):
        raise PackError(
            f"{flag_of(named[0])}: {splits.source} has no validation examples. Add some, or remove "
            "the test examples: then a part of the training examples is held out.",
            "conflict",
            named[0],
        )


def better_earlier(curve: Sequence[dict]) -> str | None:
    """Return which earlier batch had a clearly better validation score than the last one."""
    validated = [line for line in curve if StoredScore.of(line)]
    if not validated:
        return None

    end = validated[-1]
    last = best = StoredScore.of(end)
    for line in validated:
        score = StoredScore.of(line)
        if line.get("phase") == end.get("phase") and score.is_better_than(best):
            best = score
            batch = line["batch"]

    if not best.is_better_than(last, by=_CLEARLY):
        return None

    return (
        f"the validation {best.measure} was {best.value:.3f} at batch {batch} and "
        f"{last.value:.3f} at batch {end['batch']}: --load-best ends with the best weights"
    )
