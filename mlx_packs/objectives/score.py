"""The score of a model: the one number that runs are compared by, and its direction."""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import ClassVar

from ..errors import PackError, any_of

LOSS = "loss"
REWARD = "reward"
_ENTRIES = {REWARD: "valid_reward", LOSS: "valid_loss"}  # of a line of metrics.jsonl
_PREFIX = "valid_"  # of the numbers of a validation there
_LOWER_IS_BETTER = (LOSS, "ppl")  # ends of what is measured


class Score(ABC):
    """The score of some batches.

    Attributes:
        value: what early stopping and --load-best compare.
        measure: what it is: `LOSS`, `REWARD` or another number of a validation.
        rows: number of examples.
    """

    value: float
    rows: int
    measure: ClassVar[str] = LOSS

    @property
    @abstractmethod
    def entries(self) -> dict[str, float]:
        """Entries of the line in metrics.jsonl: ``valid_loss`` or ``valid_reward``, and others."""

    @property
    @abstractmethod
    def text(self) -> str:
        """The same in one line for people."""

    def to_json(self) -> dict[str, float | None]:
        """Return numbers by name, which `from_json` reads in a resumed run."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping) -> "Score":
        return cls(**values)

    @property
    def perplexity(self) -> dict[str, float | None] | None:
        """Perplexity, its standard error and the accuracy, for reports of phases; None without."""
        return None

    @property
    def reported(self) -> Mapping[str, float | None]:
        """The numbers that a run's report has before and after it; ``x_se`` is the error of x."""
        return self.perplexity or {}

    @property
    def described(self) -> Mapping[str, float]:
        """What a report has of the examples that were scored."""
        return {"rows": self.rows}

    @property
    def higher_is_better(self) -> bool:
        """Whether a score is better if its value is higher."""
        return not self.measure.endswith(_LOWER_IS_BETTER)

    def by(self, entry: str | None) -> "Score":
        """Return the score by one of its entries, or by its own value; a PackError without it."""
        if entry is None:
            return self
        check_best(entry, self.entries)

        return StoredScore(self.entries[entry], entry.removeprefix(_PREFIX))

    def is_better_than(self, other: "Score | None", by: float = 0.0) -> bool:
        """Return whether this score is better; one that is not finite never is.

        Args:
            other: another score of the same measure, or None.
            by: how much better, as a share of the larger of both values.
        """
        if other is None:
            return math.isfinite(self.value)

        gain = self.value - other.value
        if not self.higher_is_better:
            gain = -gain
        return gain > by * max(abs(self.value), abs(other.value))


@dataclass(frozen=True)
class StoredScore(Score):
    """A score as files have it: its value and what it measures."""

    value: float
    measure: str = LOSS  # type: ignore[misc]

    @classmethod
    def of(cls, stored: Mapping, entry: str | None = None) -> "StoredScore | None":
        """Return the score in a line of metrics.jsonl or a checkpoint's state; None without one.

        It is ``entry``'s, or the loss or reward.
        """
        if entry is not None:
            value = stored.get(entry)
            if value is None:
                return None
            return cls(value, entry.removeprefix(_PREFIX))

        for measure, entry in _ENTRIES.items():
            if (value := stored.get(entry)) is not None:
                return cls(value, measure)
        return None

    @property
    def entries(self) -> dict[str, float]:
        return {f"{_PREFIX}{self.measure}": self.value}

    @property
    def text(self) -> str:
        return f"{self.measure} {self.value:.3f}"


def check_best(entry: str | None, entries: Collection[str]) -> None:
    """Raise a PackError if validations do not give the number that ``--best`` names."""
    if entry is not None and entry not in entries:
        text = f"--best {entry}: is no number of these validations. Use {any_of(list(entries))}."
        raise PackError(text, "conflict", "best")


def was_scored(line: Mapping) -> bool:
    """Return whether a line of metrics.jsonl is of a validation, whose score may be null."""
    return any(entry in line for entry in _ENTRIES.values())
