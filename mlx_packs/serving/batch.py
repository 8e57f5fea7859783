"""The base with its packs, as mlx-lm's batches call it: the cache of a sequence knows its pack.

mlx-lm's `BatchGenerator` joins, splits and filters the caches of its sequences as they come and go.
`PackOfSequence` is one more cache of each, so that packs and sequences stay in line through
whatever it does.
"""

from collections.abc import Sequence
from typing import Any

from mlx_lm.models.cache import make_prompt_cache

from ..runtime import mx
from .slots import PackSlots


class PackOfSequence:
    """The slots of the sequences of a batch, with the interface of mlx-lm's caches."""

    nbytes = 0
    state: tuple = ()

    def __init__(self, slots: Sequence[int]) -> None:
        self.slots = list(slots)

    @classmethod
    def merge(cls, caches: Sequence["PackOfSequence"]) -> "PackOfSequence":
        return cls([slot for cache in caches for slot in cache.slots])

    def extend(self, other: "PackOfSequence") -> None:
        self.slots += other.slots

    def filter(self, keep: Sequence[int]) -> None:
        self.slots = [self.slots[i] for i in keep]

    def extract(self, i: int) -> "PackOfSequence":
        return PackOfSequence([self.slots[i]])

    def prepare(self, **_: Any) -> None:
        """Nothing is padded here."""

    def finalize(self) -> None:
        """Nothing was padded here."""


class BatchedModel:
    """The model of a base, called with caches that end with a `PackOfSequence`.

    Args:
        slots: the packs on the base.
    """

    def __init__(self, slots: PackSlots) -> None:
        self._model = slots.base.model
        self._selection = slots.selection

    def __call__(self, tokens: mx.array, cache: Sequence[Any]) -> mx.array:
        """Map tokens [B, T] to logits [B, T, V], each sequence with its own pack."""
        *caches, packs = cache
        self._selection.set(packs.slots)
        return self._model(tokens, cache=caches)

    def new_cache(self) -> list[Any]:
        """Return empty caches of one sequence, without its pack."""
        return make_prompt_cache(self._model)


def cache_bytes(model: BatchedModel) -> tuple[int, int]:
    """Measure what a sequence keeps: bytes of whatever its length, and bytes for each token."""
    sizes = []
    for tokens in (1, _STEP + 1):
        caches = [c.merge([c]) for c in model.new_cache()]
        model(mx.zeros((1, tokens), dtype=mx.int32), [*caches, PackOfSequence([-1])])
        mx.eval([c.state for c in caches])
        sizes.append(sum(c.nbytes for c in caches))

    first, second = sizes  # after one and after two allocations of so many tokens
    each = max(0, (second - first) // _STEP)
    return max(0, first - each * _STEP), each


_STEP = 256  # tokens that mlx-lm's caches make room for at once


def reserved_tokens(tokens: int) -> int:
    """Return the tokens that caches make room for where a sequence has so many."""
    return -(-tokens // _STEP) * _STEP
