"""Steps of batches whose rows begin alike: as a tree, as rows, and mlx-lm's.

A tree computes what a group of rows begins with once (`mlx_packs.data.trees`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_packs.data.shapes import TILE, padded_suffix
from mlx_packs.data.trees import prefix_of

from .capture import MLX_LM, OURS, StepJob
from .step import Step

POLICIES = ("none", "block")


@dataclass(frozen=True)
class TreeShape:
    """A batch: ``rows`` in ``groups``, whose rows have ``common`` inputs and ``own`` ones each.

    Of the common ones, all groups have the ``root``.
    """

    name: str
    common: int
    own: int
    rows: int
    groups: int = 1
    root: int = 0

    @property
    def length(self) -> int:
        """Inputs of a row, padded to whole tiles, as mlx-lm and training on a GPU pad it."""
        return -(-(self.common + self.own) // TILE) * TILE

    @property
    def prefix(self) -> int:
        """Inputs that are computed once, as training on a GPU cuts them."""
        return prefix_of(self.common)

    @property
    def promised(self) -> float:
        """Inputs of the rows over those of a tree that shares all that is common, unpadded."""
        of_prefixes = self.root + self.groups * (self.common - self.root)
        computed = of_prefixes + self.rows * self.own
        return self.rows * (self.common + self.own) / computed

    def jobs(self, config: dict, rank: int) -> list[tuple[str, StepJob]]:
        """Return the steps of mlx-lm, of rows and of the tree, by implementation.

        Ours predict what is their own; mlx-lm's head takes all positions.
        """
        targets = self.rows * self.own
        size = {"config": config, "batch": self.rows, "length": self.length, "rank": rank}
        own = {**size, "targets": targets}
        suffix = padded_suffix(self.common + self.own - self.prefix, self.length, self.rows)
        tree = {**own, "length": self.prefix + suffix}
        tree |= {"groups": self.groups, "prefix": self.prefix, "root": prefix_of(self.root)}

        theirs = [(MLX_LM, StepJob(**size, recompute=policy)) for policy in POLICIES]
        rows = [(OURS, StepJob(**own, recompute=policy)) for policy in POLICIES]
        trees = [(OURS, StepJob(**tree, recompute=policy)) for policy in POLICIES]
        return theirs + rows + trees

    def gains(self, steps: Sequence[Step], chips: Sequence[str]) -> str:
        """Return what a tree saves beside rows, of the steps of `jobs`, for people."""
        rows, _, tree, _ = (step.whole for step in steps[len(POLICIES) :])
        times = min(rows.seconds[chip] / tree.seconds[chip] for chip in chips)
        memory = tree.peak_bytes / rows.peak_bytes
        return (
            f"a tree: {times:.2f} times as fast as rows, {times / self.promised:.0%} of the "
            f"{self.promised:.2f} that its inputs promise; peak activations x {memory:.2f}"
        )


SHAPES = (
    TreeShape("200 common, 8 rows of 100", 200, 100, 8),
    TreeShape("1000 common, 8 rows of 200", 1000, 200, 8),
    TreeShape("1500 common, 16 rows of 150", 1500, 150, 16),
    TreeShape("4000 common, 16 rows of 100", 4000, 100, 16),
    TreeShape("4 pairs, 300 common, 2 rows of 200", 300, 200, 8, groups=4),
    TreeShape("a prompt of 300, 8 rows of 200", 300, 200, 8),
    TreeShape("1200 common, 4 pairs, 500 common, 2 rows of 200", 1700, 200, 8, 4, 1200),
    TreeShape("500 common, 2 documents of 1500, 4 rows of 60", 2000, 60, 8, 2, 500),
    TreeShape("32 common, 8 rows of 26", 32, 26, 8),  # banking77 as it is
)
