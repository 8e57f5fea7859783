"""Metrics of generated answers: one entry each, by the name of ``--metric``."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..config.choices import ANSWER_METRICS, registered
from ..config.data import DataConfig
from ..reading import parse_json

NO_METRIC = "none"
EMBEDDED_METRIC = "exact"  # of the embedded data set, where none is named
_INVALID = object()  # what a text that is not JSON parses to


@dataclass(frozen=True)
class Metric:
    """A rule by which an answer is right, given the expected one."""

    is_right: Callable[[str, str], bool]
    is_valid: Callable[[str], bool] | None = None  # the form that both must have
    spare_tokens: int = 8  # how much longer than the longest wanted answer one may become


def is_exact(answer: str, wanted: str) -> bool:
    """Return whether two texts are equal but for white space around them."""
    return answer.strip() == wanted.strip()


def contains(answer: str, wanted: str) -> bool:
    return wanted.strip() in answer


def is_json(text: str) -> bool:
    return _value(text) is not _INVALID


def same_json(answer: str, wanted: str) -> bool:
    """Return whether two texts are the same value of JSON, however it is written."""
    value = _value(answer)
    return value is not _INVALID and _is_same(value, _value(wanted))


def _value(text: str) -> Any:
    with suppress(ValueError):
        return parse_json(text)
    return _INVALID


def _is_same(one: Any, other: Any) -> bool:
    """Compare values as JSON has them: true is not 1, but 1.0 is."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(one[k], other[k]) for k in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and one == other


METRICS: dict[str, Metric] = registered(
    ANSWER_METRICS,
    {
        "exact": Metric(is_exact),
        "contains": Metric(contains, spare_tokens=64),
        "json": Metric(same_json, is_json),
    },
)


def metric_of(name: str | None, columns: DataConfig) -> str | None:
    """Return the metric for some data: the named one, else that of the embedded data set."""
    if name is None:
        is_embedded = columns.data == "tiny" and columns.hf_dataset is None
        return EMBEDDED_METRIC if is_embedded else None
    if name == NO_METRIC:
        return None
    return name
