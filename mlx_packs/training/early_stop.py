"""A run that ends before its last batch on purpose: patience, its time, or an observer's wish."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic

from ..config.schema import TrainConfig
from ..data.rows import Splits
from ..display import clock
from ..errors import PackError, flag_of
from .observers.observer import Observer

_CLEARLY = 0.01  # less, as a share of the loss


@dataclass
class EarlyStop:
    """The least validation loss of a run so far, and why it should end now.

    Args:
        train: ``patience`` and ``time``.
        curve: the lines of metrics.jsonl; a resumed run continues with what they tell.
        observers: of the run, each of which may end it.
    """

    train: TrainConfig
    curve: Sequence[dict] = ()
    observers: Sequence[Observer] = ()
    batch: int = 0  # of the least loss
    loss: float = float("inf")
    since: int = 0  # validations after it
    _started: float = field(default_factory=lambda: monotonic())

    def __post_init__(self) -> None:
        for line in self.curve:
            if "valid_loss" in line:  # null where it was not finite
                loss = line["valid_loss"]
                self.add(line["batch"], float("nan") if loss is None else loss)

    def add(self, batch: int, loss: float) -> bool:
        """Record a validation loss; return whether it is the least so far."""
        if loss < self.loss:
            self.batch, self.loss, self.since = batch, loss, 0
            return True
        self.since += 1
        return False

    def reason(self) -> str | None:
        """Return why the run should end, in words; None to go on."""
        patience, seconds = self.train.patience, self.train.seconds
        if patience is not None and self.since >= patience:
            times = f"{patience} validations" if patience > 1 else "a validation"
            return f"no lower validation loss in {times}"
        if seconds is not None and monotonic() - self._started >= seconds:
            return f"it trained for {clock(seconds)} (--time)"
        return next((o.stop_reason for o in self.observers if o.stop_reason), None)


def check_validated(train: TrainConfig, splits: Splits) -> None:
    """Raise a PackError if the best step is asked for, and there is nothing to find it by."""
    named = train.changed(("load_best", "patience"))
    if named and not len(splits.rows["valid"]):
        raise PackError(
            f"{flag_of(named[0])}: {splits.source} has no validation examples. Add some, or remove the "
            "test examples: then a part of the training examples is held out.",
            "conflict",
            named[0],
        )


def better_earlier(curve: Sequence[dict]) -> str | None:
    """Return which earlier batch had a clearly lower validation loss than the last validated one."""
    validated = [line for line in curve if line.get("valid_loss")]
    losses = [
        (line["valid_loss"], line["batch"])
        for line in validated
        if line.get("phase") == validated[-1].get("phase")
    ]
    if not losses or min(losses)[0] > (1 - _CLEARLY) * losses[-1][0]:
        return None
    (best, batch), (last, end) = min(losses), losses[-1]
    return (
        f"the validation loss was {best:.3f} at batch {batch} and {last:.3f} at batch {end}: "
        "--load-best ends with the best weights"
    )
