"""The layout of the JSON in answers, of which a value has many, and a pack learns one."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import islice, pairwise
from typing import Any

from ..config.data import JSON_LAYOUT, DataConfig
from ..reading import parse_json
from .left_out import conversations_of
from .rows import Splits

_MOST_ROWS = 1000  # that are read
_FIELD_SHARE = 0.1  # of the answers have a key that names a field, rather than a value
# The share of a value that is recorded: it becomes exact, the beginning, or optional.
_SHARES = {
    "item_separator": 0.9,
    "key_separator": 0.9,
    "opening": 0.5,
    "inside": 0.1,
    "thoughts": 0.1,
}
_JSON = re.compile(r"(.*</think>)?(\s*(?:```\w*\s+)?)([\[{].*[\]}])\s*(?:```)?\s*", re.DOTALL)
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


def json_layout(splits: Splits, columns: DataConfig) -> dict[str, Any]:
    """Return the layout of the JSON in training rows; empty if no answer is JSON.

    It has parts of `JSON_LAYOUT`, ``keys`` in the order that they have in all rows, and
    ``thoughts``: whether thoughts come before the JSON.
    """
    counts: dict[str, Counter] = {part: Counter() for part in _SHARES}
    orders: list[list[str]] = []
    answers = 0
    for thoughts_and_answer, arguments in islice(_answers(splits, columns), _MOST_ROWS):
        is_json = _count(thoughts_and_answer, counts, orders)
        answers += is_json or bool(arguments)
        orders += _orders(arguments)

    layout: dict[str, Any] = {}
    for part, counter in counts.items():
        shares = {value: count / counter.total() for value, count in counter.items() if value}
        value = max(shares, key=shares.__getitem__, default=None)
        if value is None or shares[value] < _SHARES[part]:
            continue
        if part == "thoughts" or re.fullmatch(JSON_LAYOUT[part], value, re.ASCII):
            layout[part] = value
    if keys := _in_one_order(orders, answers):
        layout["keys"] = keys
    return layout


def _answers(splits: Splits, columns: DataConfig) -> Iterator[tuple[str, list]]:
    """Yield each answer with its thoughts, and the arguments of the calls of its row."""
    for row in splits.usable("train"):
        # of a preference the chosen completion
        content = next(conversations_of(row, splits.format, columns), None)
        if content is None:
            return
        answer = content.answer or ""
        if content.thoughts:
            answer = f"{content.thoughts}</think>{answer}"
        yield answer, content.arguments


def _count(answer: str, counts: Mapping[str, Counter], orders: list[list[str]]) -> bool:
    """Count the parts of an answer, and add the keys of its objects; return whether it is JSON."""
    match = _JSON.fullmatch(answer)
    if match is None:
        return False
    thoughts, opening, text = match.groups()
    try:
        value = parse_json(text)
    except ValueError:
        return False

    text = _STRING.sub('""', text)
    counts["thoughts"][bool(thoughts)] += 1
    if not thoughts:
        counts["opening"][opening] += 1
    counts["item_separator"].update(re.findall(r"[ \t]*,[ \t]*", text))
    counts["key_separator"].update(re.findall(r"[ \t]*:[ \t]*", text))
    if inside := re.match(r"[\[{](\s*)[^\s\]}]", text):
        counts["inside"][inside[1]] += 1
    orders += _orders(value)
    return True


def _orders(value: Any) -> list[list[str]]:
    """Return the keys of each object in a value."""
    orders = []
    values = [value]
    while values:
        each = values.pop()
        if isinstance(each, dict):
            orders.append(list(each))
            values += each.values()
        elif isinstance(each, list):
            values += each
    return orders


def _in_one_order(orders: Sequence[Sequence[str]], answers: int) -> list[str]:
    """Return the keys of fields in the order that they have everywhere; empty if there is none."""
    counts = Counter(key for keys in orders for key in keys)
    fields = {key for key, count in counts.items() if count >= _FIELD_SHARE * answers}

    before: dict[str, set[str]] = {key: set() for key in counts if key in fields}
    for keys in orders:
        for first, second in pairwise(key for key in keys if key in fields):
            before[second].add(first)

    try:
        return list(TopologicalSorter(before).static_order())
    except CycleError:
        return []
