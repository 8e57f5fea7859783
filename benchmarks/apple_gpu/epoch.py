"""An epoch over examples of many lengths: each shape of its batches is laid out and priced."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from .capture import EpochJob, StepJob, capture
from .step import lay_out

_SHORTEST = 16


@dataclass(frozen=True)
class Examples:
    """Examples of lognormal lengths in tokens, of whose inputs a share predicts a target."""

    mean: float
    sigma: float
    supervised: float
    count: int
    max_length: int
    seed: int = 0

    def lengths(self) -> list[int]:
        random = np.random.default_rng(self.seed)
        drawn = random.lognormal(np.log(self.mean) - self.sigma**2 / 2, self.sigma, self.count)
        return np.clip(np.round(drawn), _SHORTEST, self.max_length).astype(int).tolist()

    def targets(self) -> int:
        return sum(max(1, round((n - 1) * self.supervised)) for n in self.lengths())


@dataclass(frozen=True)
class Epoch:
    """What an epoch of one implementation costs, with the compilation of every step.

    Args:
        steps: how many different ones are compiled.
        fill: share of the inputs of its batches that belong to examples.
        seconds: by chip.
    """

    name: str
    batches: int
    steps: int
    fill: float
    targets: int
    seconds: dict[str, float]

    def target_us(self, chip: str) -> float:
        """Return microseconds a supervised token."""
        return 1e6 * self.seconds[chip] / self.targets


def epochs(
    asked: Sequence[tuple[str, StepJob]], examples: Examples, chips: Sequence[str]
) -> list[Epoch]:
    """Return an epoch for each implementation and kind of step, whose size the batches decide.

    Raises: capture.Failed, costs.Unpriced.
    """
    lengths, targets = examples.lengths(), examples.targets()
    batches = _batches(asked, lengths, examples)
    shapes = [(i, shape) for i, own in enumerate(batches) for shape in {b[:3]: None for b in own}]
    sized = [
        (asked[i][0], replace(asked[i][1], batch=batch, length=length, targets=slots))
        for i, (batch, length, slots) in shapes
    ]
    priced = dict(zip(shapes, lay_out(sized, chips), strict=True))
    results = []
    for i, own in enumerate(batches):
        counted = [(priced[i, batch[:3]], count) for batch, count in own.items()]
        seconds = {
            chip: sum(step.trace_s + count * step.whole.seconds[chip] for step, count in counted)
            for chip in chips
        }
        inputs = sum(n * t * count for (n, t, *_), count in own.items())
        fill = sum(n - 1 for n in lengths) / inputs
        name = counted[0][0].name
        results.append(Epoch(name, sum(own.values()), len(own), fill, targets, seconds))
    return results


def _batches(
    asked: Sequence[tuple[str, StepJob]], lengths: list[int], examples: Examples
) -> list[Counter[tuple[int, int, int, int]]]:
    """Return how many batches each has by compiled step (`our_step.batch_steps`)."""
    batches: dict[tuple[str, int, bool], Counter] = {}
    for implementation, job in asked:
        key = implementation, job.batch, job.packed
        if key not in batches:
            epoch = EpochJob(
                lengths, examples.supervised, job.batch, job.packed, examples.max_length
            )
            batches[key] = Counter(map(tuple, capture(implementation, [epoch])[0]))
    return [batches[implementation, job.batch, job.packed] for implementation, job in asked]
