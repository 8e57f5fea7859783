"""Searches: which values the trials of a sweep have, and how long each is trained."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from ..config.fields import Fault, Settings, option
from ..config.parse import setting_error
from .parameters import Parameter

MOST_TRIALS = 10_000
_ATTEMPTS = 100  # at drawing values that no trial has yet, for each trial

Values = dict[str, Any]  # of a trial, by key


@dataclass(frozen=True)
class Search:
    """A way to choose trials.

    Attributes:
        draws: whether values are drawn at random, as many as ``trials``; else all combinations.
        halves: whether the worse trials end early.
    """

    draws: bool = False
    halves: bool = False


SEARCHES: dict[str, Search] = {
    "grid": Search(),
    "random": Search(draws=True),
    "halving": Search(draws=True, halves=True),
}


@dataclass(frozen=True, repr=False)
class SweepConfig(Settings):
    """The section ``sweep`` of a recipe."""

    search: str = option(
        "grid",
        "All combinations of listed values (grid), values at random (random), or these with successive "
        "halving: the worse trials end early (halving).",
        section="Optimization",
        choices=tuple(SEARCHES),
    )
    trials: int | None = option(
        None,
        "Number of trials to draw.",
        section="Optimization",
        at_least=1,
        at_most=MOST_TRIALS,
    )
    seed: int = option(
        0, "Random seed of the values.", section="Optimization", at_least=0, below=2**32
    )
    metric: str | None = option(
        None, "Held-out metric that trials are compared by.", section="Evaluation and gates"
    )
    reduction_factor: int = option(
        3,
        "Of the trials of a rung, one in so many goes on, and is trained so many times as long.",
        section="Optimization",
        at_least=2,
    )
    min_iters: int | None = option(
        None, "Batches of the first rung.", section="Optimization", at_least=1
    )
    parameters: dict = option({}, "Values by key of the recipe.", section="Optimization")

    def _conflicts(self) -> Iterator[Fault]:
        """Faults of settings of one search beside another."""
        if (search := SEARCHES.get(self.search)) is None:
            return  # a fault of its own
        if search.draws and self.trials is None:
            yield Fault("trials", f"is required with search {self.search}. Give a number.")
        if not search.draws and self.trials is not None:
            text = "a grid has as many trials as combinations. Leave it out, or use search random."
            yield Fault("trials", text, "conflict")
        for name in () if search.halves else self.changed(("reduction_factor", "min_iters")):
            yield Fault(name, "belongs to search halving. Leave it out.", "conflict")


def trial_values(
    config: SweepConfig, parameters: Mapping[str, Parameter], where: str
) -> list[Values]:
    """Return the values of every trial; no two are equal, and a seed gives the same ones always.

    Random search: https://jmlr.org/papers/v13/bergstra12a.html

    Args:
        config: the sweep.
        parameters: by key of the recipe.
        where: the file.

    Raises:
        PackError: a grid has a range or is too large, or there are fewer combinations than trials.
    """
    combinations = _combinations(parameters)
    if not SEARCHES[config.search].draws:
        if ranged := next((key for key, p in parameters.items() if p.values is None), None):
            text = (
                "is a range, which a grid cannot go through. List its values, or use search random."
            )
            raise setting_error(text, f"sweep.parameters.{ranged}", where, "conflict")
        if combinations > MOST_TRIALS:
            text = f"the grid has {combinations:,} trials, more than {MOST_TRIALS:,}. Use search random."
            raise setting_error(text, "sweep.parameters", where)
        listed = [parameter.values or () for parameter in parameters.values()]
        return [dict(zip(parameters, row, strict=True)) for row in itertools.product(*listed)]
    trials, random = config.trials or 0, Random(config.seed)
    if combinations < trials:
        text = f"is {trials}, but there are only {combinations:.0f} combinations. Use search grid."
        raise setting_error(text, "sweep.trials", where)
    drawn: list[Values] = []
    for _ in range(_ATTEMPTS * trials):
        values = {key: parameter.draw(random) for key, parameter in parameters.items()}
        if values not in drawn:
            drawn.append(values)
        if len(drawn) == trials:
            return drawn
    text = f"is {trials}, but only {len(drawn)} different trials were drawn. Widen a parameter."
    raise setting_error(text, "sweep.trials", where)


def _combinations(parameters: Mapping[str, Parameter]) -> float:
    """Return the number of combinations of listed values; infinity with a range."""
    return math.prod(math.inf if p.values is None else len(p.values) for p in parameters.values())


@dataclass(frozen=True)
class Rungs:
    """Successive halving: trials of each rung, and the batches after which they are compared.

    Each rung keeps one in ``factor`` trials and trains them ``factor`` times as long; the last one
    trains to the end. https://arxiv.org/abs/1502.07943

    Attributes:
        batches: at the end of each rung; None is the end of the run.
        factor: the reduction factor.
    """

    batches: Sequence[int | None] = (None,)
    factor: int = 3

    def kept(self, count: int) -> int:
        """Return how many trials of a rung with so many are promoted."""
        return max(1, count // self.factor)


def rungs_of(config: SweepConfig, iters: int) -> Rungs:
    """Return the rungs of a sweep over runs of ``iters`` batches."""
    if not SEARCHES[config.search].halves:
        return Rungs()
    factor, least = config.reduction_factor, config.min_iters or 1
    count = 0
    while factor ** (count + 1) <= (config.trials or 1) and iters // factor ** (count + 1) >= least:
        count += 1
    return Rungs((*(iters // factor**k for k in range(count, 0, -1)), None), factor)
