"""Shapes of batches: padding to few of them where each costs a compilation."""

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable
from typing import NamedTuple

import numpy as np

from .. import runtime

TILE = 32  # lengths on a GPU are multiples of it
Shape = tuple[int, int]  # (T, M) of a batch
# Of the batches of a run that is compiled: each shape costs a compilation of its own, which takes
# as long as some hundred tokens (0.4 s for 36 blocks), and memory for its graph.
MOST_SHAPES = 48
COMPILATION_TOKENS = 300
_COUNTED_BATCHES = 2000


class TreeShape(NamedTuple):
    """The shape of a tree; the first two fields are the shape of its batch of rows."""

    inputs: int  # T
    targets: int  # M
    prefix: int  # inputs that its rows begin with
    together: int = 0  # rows of each prefix; 0 is all rows of a batch
    root: int = 0  # inputs that all prefixes begin with, computed before the rest of them

    @property
    def shape(self) -> Shape:
        """(T, M) of the batch of rows."""
        return self.inputs, self.targets

    def groups(self, sequences: int) -> int:
        return -(-sequences // self.together) if self.together else 1

    def computed(self, sequences: int) -> int:
        """Return how many inputs of ``sequences`` sequences are computed."""
        groups = self.groups(sequences)
        saved = (sequences - groups) * self.prefix + (groups - 1) * self.root
        return sequences * self.inputs - saved


class PairShape(NamedTuple):
    """The shape of a batch of rows with a text in each column; the first two fields are a `Shape`.

    Attributes:
        inputs: Tokens of the widest column.
        columns: Number of columns.
        widths: Tokens of each column, which is computed in a pass of its own.
    """

    inputs: int
    columns: int
    widths: tuple[int, ...]

    @classmethod
    def of(cls, widths: Iterable[int]) -> "PairShape":
        widths = tuple(widths)
        return cls(max(widths), len(widths), widths)

    def cut(self, longest: int) -> "PairShape":
        return self.of(min(width, longest) for width in self.widths)


def widths_of(shape: Shape) -> tuple[int, ...]:
    """Return the tokens of each column of texts of a batch of pairs."""
    if isinstance(shape, PairShape):
        return shape.widths
    return (shape[0],) * shape[1]


def sequence_inputs(max_seq_length: int) -> int:
    """Return the most inputs of a sequence of examples of at most ``max_seq_length`` tokens.

    It is one less, since the last token is only predicted. If steps are compiled, as on a GPU, a
    multiple of 32 tokens has as many inputs, the last one padded: products have whole tiles.
    """
    aligned = runtime.COMPILES and max_seq_length % TILE == 0
    return max_seq_length - (not aligned)


def padded_length(longest: int, limit: int) -> int:
    """Return T for a batch: the next multiple of 8, of 16 above 256, of 32 above 512, and so on.

    If steps are compiled, as on a GPU, it is the next multiple of 32, the edge of a tile.
    """
    if runtime.COMPILES:
        return min(-(-longest // TILE) * TILE, max(limit, 1))

    step = 8
    while longest > 32 * step:
        step *= 2
    return min(-(-longest // step) * step, max(limit, 1))


def doubled_widths(limit: int) -> tuple[int, ...]:
    """Return 32, 64, 128, ... and ``limit``."""
    return *itertools.takewhile(lambda w: w < limit, (32 << k for k in itertools.count())), limit


def padded_suffix(longest: int, limit: int, rows: int) -> int:
    """Return S for ``rows`` rows that follow a common prefix: the next multiple of 8.

    If steps are compiled, as on a GPU, the inputs of all rows make whole tiles.
    """
    step = 8
    if runtime.COMPILES:
        step *= TILE // math.gcd(TILE, rows * step)
    return min(-(-longest // step) * step, max(limit, 1))


def padded_targets(count: int, slots: int) -> int:
    """Return M: as many 32nds of the ``slots`` = B x T positions as needed, but at least one."""
    return next(m for k in itertools.count(1) if (m := slots * k // 32) >= max(count, 1))


def fitting_shape(shape: Shape, batch_size: int, shapes: Collection[Shape] | None) -> Shape:
    """Return the cheapest of ``shapes`` that holds a batch of ``shape``; None allows any."""
    if shapes is None:
        return shape
    fitting = [s for s in shapes if s[0] >= shape[0] and s[1] >= shape[1]]
    return min(fitting, key=lambda s: _shape_cost(s, batch_size))


def joined_shapes(batches: Iterable[Shape], largest: Shape, batch_size: int) -> frozenset[Shape]:
    """Return at most `MOST_SHAPES` shapes, one of which holds any batch up to the ``largest``.

    The shapes of the first ``batches`` are joined, two at a time that add the least padding, while
    padding from one to another costs less than a compilation.
    """
    counts = Counter(itertools.islice(batches, _COUNTED_BATCHES))
    counts[largest] += 0
    shapes = np.array(sorted(counts))  # [n, 2]
    numbers = np.array([counts[length, slots] for length, slots in shapes.tolist()])
    alive = np.ones(len(shapes), dtype=bool)

    def added(one: int) -> np.ndarray:
        """Return the added cost of joining a shape with each other one, [n]."""
        alone = _shape_cost(shapes.T, batch_size) * numbers
        joined = _shape_cost(np.maximum(shapes[one], shapes).T, batch_size)
        costs = joined * (numbers[one] + numbers) - alone[one] - alone
        return np.where(alive & (np.arange(len(shapes)) != one), costs, np.inf)

    costs = np.stack([added(one) for one in range(len(shapes))])
    while alive.sum() > 1:
        one, other = np.unravel_index(costs.argmin(), costs.shape)
        if alive.sum() <= MOST_SHAPES and costs[one, other] >= 4 * COMPILATION_TOKENS:
            break
        shapes[one] = np.maximum(shapes[one], shapes[other])
        numbers[one] += numbers[other]
        alive[other] = False
        costs[one] = costs[:, one] = added(one)
        costs[other] = costs[:, other] = np.inf

    return frozenset((length, slots) for length, slots in shapes[alive].tolist())


def _shape_cost(shape: Shape, batch_size: int) -> int:
    """A target counts as a quarter of a token."""
    # of the blocks: it is a tenth in Qwen3-4B, a third in Qwen3-0.6B
    return 4 * batch_size * shape[0] + shape[1]
