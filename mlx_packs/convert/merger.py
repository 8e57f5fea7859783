"""What differs between architectures when a pack is merged: how the result is compared."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from .merge_plan import MergeRequest


@dataclass(frozen=True)
class Outcome:
    """How far a merged model is from the base with the pack attached.

    Attributes:
        scores: for the report.
        recorded: those of the scores that the written folder records.
        distance: what ``limit`` limits.
        limit: largest distance that passes.
        tried: the distance of every setting that was tried.
        passes: the cheapest of them within the limit.
    """

    scores: dict[str, float]
    recorded: tuple[str, ...]
    distance: float
    limit: float
    tried: dict[str, float]
    passes: str | None


class Merger(Protocol):
    """The merge of one kind of architecture."""

    def check(self, request: MergeRequest) -> None:
        """Check a request before anything is loaded.

        Raises:
            PackError: it does not apply to this architecture.
        """

    def compare(self, request: MergeRequest) -> Outcome:
        """Compare the merged model, before it is written, with the pack attached."""


def first_that_passes(
    setting: str, distance: float, limit: float, others: Mapping[str, Callable[[], float]]
) -> tuple[dict[str, float], str | None]:
    """Return the distances of the settings tried, and the first within the limit.

    Args:
        setting: what was asked for.
        distance: its distance.
        limit: the largest distance that passes.
        others: settings that are tried in turn if it does not, each with what measures it.
    """
    tried = {setting: distance}
    if distance <= limit:
        return tried, setting
    for other, measure in others.items():
        tried[other] = measure()
        if tried[other] <= limit:
            return tried, other
    return tried, None
