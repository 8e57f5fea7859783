"""The page of several seeds: every number's mean and standard error, and each seed's value."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

from .facts import MetricChange, Points, number, progress_series
from .page import Chart, chart, environment

_WIDE = (1040, 360)
_NARROW = (360, 280)


@dataclass(frozen=True)
class SeedFacts:
    """One seed on a page; it has no ``numbers`` and ``changes`` if it has no result.

    Attributes:
        name: of its pack: seed-0.
        note: what became of it, in words.
        link: the address of its own page, relative to this one; empty without one.
        numbers: of its report, by name.
    """

    name: str
    note: str = ""
    link: str = ""
    curve: Mapping[str, Points] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    changes: Sequence[MetricChange] = ()


@dataclass(frozen=True)
class SeedsFacts:
    """The content of a page; ``status`` is what is missing, ``recipe`` as of `Page`."""

    title: str
    seeds: Sequence[SeedFacts]
    sub: str = ""
    status: str = ""
    recipe: Sequence[tuple[str, Sequence[tuple[str, str, bool]]]] = ()

    @property
    def finished(self) -> list[SeedFacts]:
        """The seeds with a result."""
        return [seed for seed in self.seeds if seed.numbers]


@dataclass(frozen=True)
class NumberRow:
    """A number of several seeds as text: mean with its standard error, and each seed's value."""

    name: str
    mean: str
    values: Sequence[str]
    before: str = ""


def numbers_of(report: Mapping[str, Any]) -> dict[str, float]:
    """Return every number of a report by its name; names in other mappings are joined by dots."""
    return dict(_numbers(report, ""))


def _numbers(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}.")
        elif (known := number(value)) is not None:
            yield prefix + name, known


def statistics(reports: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return ``mean`` and ``standard_error`` of every number that all reports have, by its name.

    Names of numbers in other mappings are joined by dots. The standard error is of the mean
    of independent runs: the sample standard deviation by the root of their number.
    """
    numbers = [numbers_of(report) for report in reports]
    names = [name for name in numbers[0] if all(name in each for each in numbers)]

    means = {}
    errors = {}
    for name in names:
        values = [each[name] for each in numbers]
        means[name] = fmean(values)
        errors[name] = stdev(values) / math.sqrt(len(values))
    return {"mean": means, "standard_error": errors}


def rows_of(numbers: Sequence[Mapping[str, float]]) -> list[NumberRow]:
    """Return a row for each number that all of at least two seeds have."""
    summary = statistics(numbers)
    rows = []
    for name, mean in summary["mean"].items():
        values = [each[name] for each in numbers]
        shown = _text(mean)
        if error := summary["standard_error"][name]:
            shown += f" ± {error:.2g}"
        rows.append(NumberRow(name, shown, [*map(_text, values)]))
    return rows


def result_rows(seeds: Sequence[SeedFacts]) -> list[NumberRow]:
    """Return a row for each held-out metric after training, with its mean before."""
    before = rows_of([{change.title: change.before for change in seed.changes} for seed in seeds])
    after = rows_of([{change.title: change.after for change in seed.changes} for seed in seeds])

    directions = {each.title: each.number.lower_is_better for each in seeds[0].changes}
    rows = []
    for old, new in zip(before, after, strict=True):
        better = "lower" if directions[new.name] else "higher"
        rows.append(NumberRow(f"{new.name} ({better} is better)", new.mean, new.values, old.mean))
    return rows


def render(facts: SeedsFacts) -> str:
    """Return the page as HTML: one file, no script, nothing from elsewhere."""
    results = []
    rows = []
    if len(facts.finished) > 1:
        results = result_rows(facts.finished)
        rows = rows_of([seed.numbers for seed in facts.finished])

    template = environment().get_template("seeds.html.jinja")
    return template.render(
        facts=facts,
        results=results,
        rows=rows,
        wide=_progress(facts, _WIDE),
        narrow=_progress(facts, _NARROW),
    )


def _progress(facts: SeedsFacts, size: tuple[int, int]) -> Chart | None:
    """Return the curves of all seeds, and the mean of those with a result, if they are two."""
    measure, validation = progress_series({name: 0 for seed in facts.seeds for name in seed.curve})
    averaged = facts.finished if len(facts.finished) > 1 else facts.seeds

    series = {}
    for name, kind, word in ((measure, "train", "training"), (validation, "valid", "validation")):
        for seed in facts.seeds:
            series[(f"{word} {measure} of {seed.name}", f"{kind} each")] = seed.curve.get(name, [])
        mean = _mean([seed.curve.get(name, []) for seed in averaged])
        series[(f"mean {word} {measure}", kind)] = mean

    return chart(series, measure, size)


def _mean(curves: Sequence[Points]) -> Points:
    """Return the mean of curves where all have a value; nothing of a single one."""
    if len(curves) < 2:
        return []
    by_batch = [dict(curve) for curve in curves]
    common = [batch for batch in by_batch[0] if all(batch in each for each in by_batch)]
    return [(batch, fmean(each[batch] for each in by_batch)) for batch in common]


def _text(value: float) -> str:
    """Return a whole or a large number without decimals, others with four digits."""
    if value.is_integer() or abs(value) >= 1e3:
        return f"{value:,.0f}"
    return f"{value:.4g}"
