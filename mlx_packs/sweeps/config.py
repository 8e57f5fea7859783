"""The section `sweep` of a recipe."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from ..config.choices import SEARCHES
from ..config.fields import Fault, Settings, option

MOST_TRIALS = 10_000
_key = partial(option, section="Optimization", flags=())


@dataclass(frozen=True, repr=False)
class SweepConfig(Settings):
    """The section ``sweep`` of a recipe."""

    search: str = _key("grid", "How values are chosen.", choices=tuple(SEARCHES))
    trials: int | None = _key(None, "Number of trials.", at_least=1, at_most=MOST_TRIALS)
    seed: int = _key(0, "Random seed of the values.", at_least=0, below=2**32)
    metric: str | None = _key(None, "Held-out metric that trials are compared by.")
    reduction_factor: int = _key(3, "Halving keeps one in N trials of a rung.", at_least=2)
    min_iters: int | None = _key(None, "Batches of the first rung.", at_least=1)
    parameters: dict = _key({}, "Values by key of the recipe.")

    def _conflicts(self) -> Iterator[Fault]:
        """Faults of settings of one search beside another."""
        search = SEARCHES.get(self.search)
        if search is None:
            return  # a fault of its own

        if search.draws and self.trials is None:
            yield Fault("trials", f"is required with search {self.search}. Give a number.")
        if not search.draws and self.trials is not None:
            text = "a grid has as many trials as combinations. Leave it out, or use search random."
            yield Fault("trials", text, "conflict")
        if not search.halves:
            for name in self.changed(("reduction_factor", "min_iters")):
                yield Fault(name, "belongs to search halving. Leave it out.", "conflict")


@dataclass(frozen=True, repr=False)
class Range(Settings):
    """A range of numbers as the values of a parameter; both ends are included."""

    min: float | None = _key(None, "The least number.")
    max: float | None = _key(None, "The greatest number.")
    scale: str = _key("linear", "Whether logarithms are drawn.", choices=("linear", "log"))

    def _conflicts(self) -> Iterator[Fault]:
        """Faults of the ends."""
        if self.min is None or self.max is None:
            missing = "min" if self.min is None else "max"
            yield Fault(missing, "is missing. Give min and max.")
        elif not self.min < self.max:
            yield Fault("min", f"is {self.min:g}, which must be less than max, {self.max:g}.")
        elif self.scale == "log" and self.min <= 0:
            text = f"must be above 0 with scale log, but is {self.min:g}. Raise it."
            yield Fault("min", text)


def rungs_of(config: SweepConfig, iters: int) -> tuple[int | None, ...]:
    """Return the batches at the end of each rung of runs of ``iters``; None is the end of the run.

    Successive halving keeps one in ``reduction_factor`` trials of a rung and trains them as many
    times as long (https://arxiv.org/abs/1502.07943). Other searches have one rung.
    """
    factor = config.reduction_factor
    rungs: list[int | None] = [None]
    part = factor
    while (
        SEARCHES[config.search].halves
        and part <= (config.trials or 1)
        and iters // part >= (config.min_iters or 1)
    ):
        rungs.insert(0, iters // part)
        part *= factor
    return tuple(rungs)
