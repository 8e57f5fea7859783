"""Metrics of generated answers: how right one is, given the expected one."""

import numbers
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..config.choices import ANSWER_METRICS, registered
from ..config.functions import function_error, load_function, names_function, raised
from ..reading import parse_json

MetricFunction = Callable[[str, str], float]  # answer and expected one in, 0 to 1 out
_INVALID = object()  # what a text that is not JSON parses to


@dataclass(frozen=True)
class Metric:
    """How right an answer is, given the expected one."""

    name: str
    score: Callable[[str, str], float]  # from 0, wrong, to 1, right
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
        "exact": Metric("exact", is_exact),
        "contains": Metric("contains", contains, spare_tokens=64),
        "json": Metric("json", same_json, is_json),
    },
)


def own_metric(function: MetricFunction) -> Metric:
    """Return the metric of a function of the user's, whose results are checked."""
    name = getattr(function, "__name__", type(function).__name__)

    def score(answer: str, wanted: str) -> float:
        try:
            value = function(answer, wanted)
        except Exception as error:
            text = f"raised {raised(error)} for the answer {answer!r:.60}."
            raise function_error("metric", name, text) from error
        if not isinstance(value, (numbers.Real, np.bool_)) or not 0 <= value <= 1:
            text = f"returned {value!r:.40}, but must return a number from 0 to 1, or a bool."
            raise function_error("metric", name, text)
        return float(value)

    return Metric(name, score, spare_tokens=METRICS["contains"].spare_tokens)


def own_metric_of(metric: MetricFunction | str | None) -> Metric | None:
    """Return the metric of a function, or of one that ``FILE.py:NAME`` names; None for others."""
    if callable(metric):
        return own_metric(metric)
    if names_function(metric):
        return own_metric(load_function("metric", str(metric)))
    return None
