"""LoRA that begins with a part of the weight: the frozen weight is used without that part."""

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from .lora import GroupedLoRA


class ResidualLoRA(GroupedLoRA):
    """Adapters of a projection group beside what is left of the weights when they begin.

    Semantics: y = (W - s B0 A0) x + s B A x, where A and B begin as A0 and B0

    The weight stays as it is, quantized or not: what it is left without is added with a minus, as
    more rows of A and columns of B.

    Args:
        lora: the group that it takes the place of, with A0 and B0 of each adapter.

    PiSSA: https://arxiv.org/abs/2404.02948
    """

    def __init__(self, lora: GroupedLoRA) -> None:
        nn.Module.__init__(self)
        self._slots, self._scales, self._kept = lora._slots, lora._scales, None
        self.dropout = lora.dropout
        self.lora_a, self.lora_b = list(lora.lora_a), list(lora.lora_b)
        self._removed_a, self._removed_b = list(lora.lora_a), [-b for b in lora.lora_b]

    @property
    def removed(self) -> list[mx.array]:
        """A0 and -B0 of each adapter, which are not trained."""
        return [*self._removed_a, *self._removed_b]

    def multiplied(self) -> tuple[list[mx.array], list[mx.array]]:
        """Return factors [D, 2R] and [2R, O] whose product is B A - B0 A0.

        They are those of B (A - A0) + (B - B0) A0: in half precision nothing large is subtracted.
        """
        a = zip(self.lora_a, self._removed_a, strict=True)
        b = zip(self.lora_b, self._removed_b, strict=True)
        return (
            [mx.concatenate([own - removed, removed], -1) for own, removed in a],
            [mx.concatenate([own, own + removed], -2) for own, removed in b],
        )

    def stored(self) -> tuple[list[mx.array], list[mx.array]]:
        """Return the same product as factors that have every bit: A with A0, B with -B0."""
        a = zip(self.lora_a, self._removed_a, strict=True)
        b = zip(self.lora_b, self._removed_b, strict=True)
        return [mx.concatenate(p, -1) for p in a], [mx.concatenate(p, -2) for p in b]

    def set_stored(self, lora_a: Sequence[mx.array], lora_b: Sequence[mx.array]) -> None:
        """Set all factors from what `stored` returns."""
        for own, removed, whole, axis in (
            (self.lora_a, self._removed_a, lora_a, -1),
            (self.lora_b, self._removed_b, lora_b, -2),
        ):
            halves = [mx.split(factor, 2, axis) for factor in whole]
            own[:], removed[:] = [h[0] for h in halves], [h[1] for h in halves]
