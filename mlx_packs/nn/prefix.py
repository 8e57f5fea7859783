"""Rows that begin alike: their common beginning, the prefix, is computed once, with its gradient.

A pass of a model over the prefixes leaves keys, values and recurrent states in its caches, in the
graph; a pass over what follows, the suffixes, reads them there. Prefixes may begin alike, too: a
pass over this root comes before theirs.

Grouped attention needs one pass for all: it computes segment by segment what a row has in it, and
everything else of a block is the same for each input. Weights are read, or dequantized, once then.
A CPU takes a pass for each level where there are many inputs.
"""

import copy
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..ops.profile import profile

if TYPE_CHECKING:
    from ..ops.span_attention import Spans

Arrays = Sequence[mx.array | None]


@dataclass(frozen=True)
class TreeWindow:
    """The mask of a `PrefixLevels`: each input sees so many of its own past; None is all."""

    size: int | None


class PrefixCache:
    """Takes the place of mlx-lm's cache of a layer, in both passes."""

    offset = 0  # position of the first input, whenever a layer or a mask asks for it
    earlier: Arrays | None = None  # [G, ...] of the pass before; None in the first
    copies = 1  # rows of this pass that follow each row of the pass before
    is_last = False  # whether no other pass reads the arrays of this one

    def arrays(self) -> Arrays:
        """Return the arrays of this pass that suffixes read."""
        raise NotImplementedError

    def set_arrays(self, arrays: Arrays) -> None:
        raise NotImplementedError

    def reset(self) -> None:
        """Forget the arrays of this pass, if it has any."""

    def following(self, earlier: Arrays | None) -> "PrefixCache":
        """Return an unused cache of the same pass that follows other arrays."""
        other = copy.copy(self)
        other.earlier = earlier
        other.reset()
        return other

    def next_pass(self, offset: int, copies: int, is_last: bool) -> "PrefixCache":
        """Return the cache of the next pass, whose rows have ``offset`` inputs before them."""
        other = copy.copy(self)
        other.offset = offset
        other.copies = copies
        other.is_last = is_last
        return other.following(self.arrays())

    def _for_each_suffix(self, array: mx.array) -> mx.array:
        """Return a view [G, copies, ...] of an array [G, ...]."""
        shape = (array.shape[0], self.copies, *array.shape[1:])
        return mx.broadcast_to(array[:, None], shape)


class PrefixKeys(PrefixCache):
    """Keys and values [B, heads, T, D] of an attention."""

    start_position = 0  # of the first key; mlx-lm's chunked caches cut some off
    keys: mx.array | None = None
    values: mx.array | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Return keys and values of prefix and suffix, [B, heads, P + T, D]."""
        if self.earlier is not None:
            keys = self._joined(self.earlier[0], keys)
            values = self._joined(self.earlier[1], values)

        self.keys = keys
        self.values = values
        return keys, values

    def keys_and_values(self) -> tuple[mx.array | None, mx.array | None]:
        return self.keys, self.values

    def make_mask(
        self,
        N: int,  # noqa: N803 - mlx-lm passes it by this name
        return_array: bool = False,
        window_size: int | None = None,
    ) -> mx.array | str | None:
        """Return the mask of N inputs, an array where a window hides keys."""
        from mlx_lm.models.base import create_causal_mask

        hides = window_size is not None and self.offset + N > window_size
        if return_array or hides:
            return create_causal_mask(N, self.offset, window_size=window_size)
        if N == 1:
            return None
        return "causal"

    def maybe_trim_front(self) -> None:
        """Cut no keys off: a mask hides them."""

    def arrays(self) -> Arrays:
        return [self.keys, self.values]

    def set_arrays(self, arrays: Arrays) -> None:
        self.keys, self.values = arrays

    def reset(self) -> None:
        self.keys = self.values = None

    def _joined(self, of_prefixes: mx.array, of_suffixes: mx.array) -> mx.array:
        by_prefix = of_suffixes.reshape(-1, self.copies, *of_suffixes.shape[1:])
        joined = mx.concatenate([self._for_each_suffix(of_prefixes), by_prefix], axis=3)
        return joined.flatten(0, 1)


class PrefixLevels(PrefixCache):
    """Levels of a tree in one row; no pass follows."""

    is_last = True

    def __init__(self, levels: "Spans") -> None:
        self.levels = levels

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        raise ValueError("its attention is not computed span by span")

    def make_mask(
        self,
        N: int,  # noqa: N803 - mlx-lm passes it by this name
        return_array: bool = False,
        window_size: int | None = None,
    ) -> TreeWindow:
        return TreeWindow(window_size)


@functools.cache
def _states_class() -> type[PrefixCache]:
    """Return the cache of recurrent layers, some of which ask for an `ArraysCache`."""
    from mlx_lm.models.cache import ArraysCache

    # last inputs of a convolution, and states of a recurrence: [B, ...] each
    class PrefixStates(PrefixCache, ArraysCache):
        def __init__(self, size: int) -> None:
            ArraysCache.__init__(self, size)

        def arrays(self) -> Arrays:
            return list(self.cache)

        def set_arrays(self, arrays: Arrays) -> None:
            self.cache = list(arrays)

        def reset(self) -> None:
            self.cache = list(self.earlier or [None] * len(self.cache))
            for i, array in enumerate(self.cache):
                if array is not None:
                    self.cache[i] = self._for_each_suffix(array).flatten(0, 1)

    return PrefixStates


def prefix_cache(cache: object) -> PrefixCache:
    """Return an empty cache in the place of mlx-lm's, or raise a ValueError for an unknown kind."""
    from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, KVCache, RotatingKVCache

    if type(cache) in (KVCache, RotatingKVCache, ChunkedKVCache):
        return PrefixKeys()
    if type(cache) is ArraysCache:
        return _states_class()(len(cache.cache))
    raise ValueError(f"it keeps more than keys, values and states: {type(cache).__name__}")


def prefix_caches_in(tree: Any) -> list[PrefixCache]:
    return [leaf for _, leaf in tree_flatten(tree) if isinstance(leaf, PrefixCache)]


def tree_states(
    model: nn.Module,
    part: Callable[..., mx.array],
    suffixes: mx.array,
    prefix: mx.array,
    root: mx.array | None = None,
) -> mx.array:
    """Return the states of a root, of the prefixes and of their suffixes, [Q + G P + R S, D].

    Args:
        model: the model.
        part: the model or its hidden states, of inputs [B, T] to [B, T, D].
        suffixes: inputs [R, S]; R / G of each prefix in turn.
        prefix: inputs [G, P].
        root: inputs [1, Q] that come before all prefixes; None is no input.
    """
    from mlx_lm.models.cache import make_prompt_cache

    levels = [level for level in (root, prefix, suffixes) if level is not None]
    if _is_one_pass(model, levels):
        spans = tuple((level.shape[1],) * level.shape[0] for level in levels)
        row = mx.concatenate([level.flatten(0, 1) for level in levels])[None]
        return part(row, cache=[PrefixLevels(spans) for _ in model.layers]).squeeze(0)

    caches = [prefix_cache(cache) for cache in make_prompt_cache(model)]
    states = []
    offset = 0
    for level, following in itertools.pairwise(levels):
        states.append(part(level, cache=caches).flatten(0, 1))
        offset += level.shape[1]
        copies = following.shape[0] // level.shape[0]
        is_last = following is suffixes
        caches = [cache.next_pass(offset, copies, is_last) for cache in caches]

    states.append(part(suffixes, cache=caches).flatten(0, 1))
    return mx.concatenate(states)


def _is_one_pass(model: nn.Module, levels: Sequence[mx.array]) -> bool:
    inputs = sum(level.size for level in levels)
    if inputs > profile().tree_inputs:
        return False

    taking = sum(getattr(module, "takes_levels", False) for module in model.modules())
    return 0 < taking == len(model.layers)
