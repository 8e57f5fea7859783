"""Images in a language model: their features enter in place of tokens below zero.

Token ``-1 - i`` of an input is row i of the features that the model is shown. Everything else that
reads tokens (packing, common prefixes, losses) treats them as other tokens.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..runtime import is_traced
from .segments import SegmentCache
from .wrapped import Hidden

# The arrays are entries of a module, so that a compiled step reads them as inputs; names that begin
# with an underscore are no parameters.
_FEATURES = "_image_features"
_LEVELS = "_image_levels"
_SHIFTS = "_image_shifts"
_BEGINS = "_image_begins"

# Tokens up to here name features of this process, those between it and zero rows of a batch.
FIRST_IMAGE = -1 - (1 << 24)

Turns = tuple[mx.array, mx.array]  # cosines and sines [B, T, head_dim / 2]


@dataclass(frozen=True)
class ShownImages:
    """What a model is shown for tokens below zero.

    features: [N, D].
    begins: bool [N], where an image begins.
    levels: [K, N, D], added to what each of the first K blocks returns; None without.
    shifts: float32 [N, 4], the position of each feature on three axes less its place, the first
        feature of an image at 0; and by how much what follows an image is shifted, at its last
        feature. None where positions are places.
    """

    features: mx.array
    begins: mx.array
    levels: mx.array | None = None
    shifts: mx.array | None = None


@dataclass(frozen=True)
class ImageRules:
    """How a language model of mlx-lm treats images.

    scale: what features are multiplied by before they enter.
    sections: how many pairs of a head's dimensions turn by each of three axes of positions; None
        where all turn by one.
    interleaved: whether the axes of ``sections`` take turns, instead of following each other.
    levels: how many of the first blocks add features of their own to what they return.
    sees: in which blocks the tokens of an image see each other: ``none``, those with a ``window``,
        or ``all``.
    """

    scale: float = 1.0
    sections: tuple[int, ...] | None = None
    interleaved: bool = False
    levels: int = 0
    sees: str = "none"


class ImageInputs:
    """How a language model of mlx-lm takes images.

    Args:
        model: whose inner model is changed in place; no parameter gets another name.
        place: called with tokens [B, T] that are not of a prepared step; returns them with rows of
            what it shows, or as they are.
    """

    def __init__(
        self, model: nn.Module, place: Callable[[mx.array], mx.array], rules: ImageRules
    ) -> None:
        self._model = Hidden([model])
        self._inner = inner_model(model)
        self._place = place
        self._rules = rules
        # of each pair of dimensions; empty with one axis
        self.axes = _axes_of(rules.sections or (), rules.interleaved)

        self._read_last = False  # whether the last part of a prompt had several tokens
        self._shown: tuple[mx.array, mx.array] | None = None  # of the inputs that are computed now
        self._turns: Turns | None = None
        self._tree: dict[tuple, mx.array] = {}  # shifts of the inputs of a tree, by their shape

        vars(self._inner)["image_inputs"] = self
        _call_through(self._inner, self._enter)
        for i, block in enumerate(self._inner.layers[: rules.levels]):
            _call_through(block, self._level(i))
        if self.has_axes:
            for block in self._inner.layers:
                block.self_attn.rope = ShiftedRoPE(block.self_attn.rope, self)

    @property
    def has_axes(self) -> bool:
        """Whether positions have three axes."""
        return self._rules.sections is not None

    def show(self, images: ShownImages) -> None:
        """Set what tokens below zero stand for, until the next call."""
        inner = self._inner
        inner[_FEATURES] = images.features
        inner[_BEGINS] = images.begins
        if images.levels is not None:
            inner[_LEVELS] = images.levels
        if images.shifts is not None:
            inner[_SHIFTS] = images.shifts

    def _enter(
        self,
        inner: nn.Module,
        plain: Callable[..., mx.array],
        inputs: mx.array,
        cache: Any = None,
        input_embeddings: mx.array | None = None,
        *others: Any,
        **named: Any,
    ) -> mx.array:
        """Compute the inner model with features in the place of tokens below zero."""
        if input_embeddings is not None:
            return plain(inner, inputs, cache, input_embeddings, *others, **named)

        is_prompt = _is_of_mlx_lm(cache)
        placed = inputs
        if is_prompt:
            placed = self._placed(inputs, cache)
        elif not is_traced(inputs):
            placed = self._place(inputs)
        if _FEATURES not in inner or (is_prompt and placed is inputs):
            return plain(inner, inputs, cache, *others, **named)

        is_image = placed < 0
        rows = mx.where(is_image, -1 - placed, 0)
        tokens = mx.maximum(placed, 0)
        embedded = inner.embed_tokens(tokens)
        features = inner[_FEATURES]
        features = (features[rows] * self._rules.scale).astype(embedded.dtype)
        embedded = mx.where(is_image[..., None], features, embedded)
        if self._rules.sees != "none":
            cache = self._seeing(cache, is_image, is_image & inner[_BEGINS][rows])

        self._shown = is_image, rows
        self._turns = self._turns_of(placed, is_prompt)
        try:
            return plain(inner, tokens, cache, embedded, *others, **named)
        finally:
            self._shown = None
            self._turns = None

    def _seeing(self, cache: Any, is_image: mx.array, begins: mx.array) -> list["SeeingCache"]:
        """Return caches whose masks let the tokens of each image see each other."""
        from mlx_lm.models.cache import make_prompt_cache

        if cache is None:
            alone = SegmentCache(mx.zeros(is_image.shape, mx.int32))
            cache = [alone for _ in make_prompt_cache(self._model.all[0])]

        number = mx.where(is_image, mx.cumsum(begins.astype(mx.int32), axis=1), 0)
        same = (number[:, :, None] == number[:, None, :]) & is_image[:, :, None]
        return [SeeingCache(each, same[:, None], self._rules.sees) for each in cache]

    def _placed(self, inputs: mx.array, cache: Any) -> mx.array:
        """Return a part of a prompt with rows of `show`.

        Generated tokens are not read, which would wait for each of them: one token alone is read
        only after several, as it may be what was left of a prompt.
        """
        several = inputs.shape[1] > 1
        if not several and not self._read_last:
            return inputs

        self._read_last = several
        placed = self._place(inputs)
        if placed is not inputs and self.has_axes:
            offsets = mx.array(getattr(cache[0], "offset", 0))  # of each row, or of all
            if ((placed < 0).any(axis=1) & (offsets > 0)).any().item():
                raise ValueError("an image follows tokens that were read before it")
        return placed

    def _level(self, i: int) -> Callable[..., mx.array]:
        def call(
            block: nn.Module, plain: Callable[..., mx.array], *inputs: Any, **named: Any
        ) -> mx.array:
            states = plain(block, *inputs, **named)
            if self._shown is None:
                return states
            is_image, rows = self._shown
            level = self._inner[_LEVELS][i][rows].astype(states.dtype)
            return states + mx.where(is_image[..., None], level, 0)

        return call

    def _turns_of(self, inputs: mx.array, is_prompt: bool) -> Turns | None:
        """Return how inputs [B, T] are turned besides by their places; None if they are not.

        What is generated after a prompt has its place as position, so a prompt is shifted to that.
        """
        if not self.has_axes:
            return None
        shifts = self._tree[inputs.shape] if self._tree else self._shifts_of(inputs)
        if is_prompt:
            shifts = shifts - shifts[:, :, -1:]

        frequencies = self._inner.layers[0].self_attn.rope.frequencies
        angles = mx.take(shifts, self.axes, axis=0).transpose(1, 2, 0) * frequencies
        return mx.cos(angles), mx.sin(angles)

    def _shifts_of(self, inputs: mx.array, before: mx.array | None = None) -> mx.array:
        """Return the shifts [3, B, T] of inputs [B, T], which follow shifts ``before`` [B].

        Examples that are packed in a row follow each other, too: only differences count.
        """
        of_features = self._feature_shifts(inputs)
        after = of_features[..., 3]
        shifted = mx.cumsum(after, axis=1) - after

        if before is not None:
            shifted = shifted + before[:, None]
        return shifted[None] + of_features[..., :3].transpose(2, 0, 1)

    def _feature_shifts(self, inputs: mx.array) -> mx.array:
        """Return the shifts of the features at inputs, [B, T, 4]; zeros at other tokens."""
        is_image = inputs < 0
        shifts = self._inner[_SHIFTS][mx.where(is_image, -1 - inputs, 0)]
        return mx.where(is_image[..., None], shifts, 0)

    def shifts_of_tree(self, tokens: mx.array, prefixes: Mapping[str, mx.array]) -> None:
        """Set the shifts of a root, prefixes and rows, which follow each other, and of all."""
        before = mx.zeros(1)
        levels = []
        for level in (prefixes.get("root"), prefixes.get("prefix"), tokens):
            if level is None or level.ndim != 2:
                continue
            before = mx.repeat(before, level.shape[0] // before.shape[0])
            shifts = self._shifts_of(level, before)
            levels.append(shifts)
            self._tree[level.shape] = shifts
            before = before + self._feature_shifts(level)[..., 3].sum(axis=1)

        whole = mx.concatenate([each.reshape(3, 1, -1) for each in levels], axis=2)
        self._tree.setdefault(whole.shape[1:], whole)

    def forget_tree(self) -> None:
        self._tree = {}

    def turned(self, x: mx.array) -> mx.array:
        """Turn queries or keys [B, heads, T, head_dim] by the shifts of the current inputs."""
        if self._turns is None:
            return x
        cosines, sines = (part.reshape(x.shape[0], 1, x.shape[2], -1) for part in self._turns)
        first, second = mx.split(x.astype(mx.float32), 2, axis=-1)
        turned = [first * cosines - second * sines, second * cosines + first * sines]
        return mx.concatenate(turned, axis=-1).astype(x.dtype)


class SeeingCache:
    """A cache of one pass, in whose mask the tokens of an image see each other.

    Args:
        cache: what keeps the keys.
        same: bool [B, 1, T, T], which inputs are of one image.
        sees: as of `ImageRules`.
    """

    def __init__(self, cache: Any, same: mx.array, sees: str) -> None:
        self._cache = cache
        self._same = same
        self._sees = sees

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def make_mask(
        self,
        N: int,  # noqa: N803 - mlx-lm passes it by this name
        return_array: bool = False,
        window_size: int | None = None,
    ) -> Any:
        """Return the mask of the cache [.., N, K], in which images are whole."""
        if window_size is None and self._sees == "window":
            return self._cache.make_mask(N, return_array=return_array, window_size=window_size)

        mask = self._cache.make_mask(N, return_array=True, window_size=window_size)
        same = self._same
        if window_size is not None:
            places = mx.arange(N)
            same = same & (places[:, None] - places < window_size)

        before = mask.shape[-1] - N
        return mask | mx.pad(same, [(0, 0), (0, 0), (0, 0), (before, 0)])


class ShiftedRoPE(nn.Module):
    """RoPE by places, and then by how far the positions of image tokens are from their places.

    Rotations add up, so that any cache and layout of places is right (arXiv:2409.12191, M-RoPE).
    """

    def __init__(self, rope: nn.Module, images: ImageInputs) -> None:
        super().__init__()
        self.rope = rope
        self.dims = rope.dims
        vars(self)["_images"] = images

        exponents = mx.arange(0, rope.dims, 2, dtype=mx.float32) / rope.dims
        self._frequencies = mx.power(rope.base, -exponents)
        mx.eval(self._frequencies)  # another thread may compute with the model

    @property
    def frequencies(self) -> mx.array:
        return self._frequencies

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        """Turn x [B, heads, T, head_dim]."""
        return self.shifted(self.rope(x, offset=offset))

    def shifted(self, x: mx.array) -> mx.array:
        """Turn x [B, heads, T, head_dim] by the shifts alone."""
        return vars(self)["_images"].turned(x)


@contextmanager
def tree_of_images(
    model: nn.Module, tokens: mx.array, prefixes: Mapping[str, mx.array]
) -> Iterator[None]:
    """Let the positions of what follows prefixes go on from theirs, in a tree (nn/prefix.py)."""
    inner = model.get("language_model", model).get("model")
    images = vars(inner).get("image_inputs") if inner is not None else None
    if images is None or not images.has_axes or _SHIFTS not in images._inner:
        yield
        return

    images.shifts_of_tree(tokens, prefixes)
    try:
        yield
    finally:
        images.forget_tree()


def inner_model(model: nn.Module) -> nn.Module:
    """Return what makes hidden states in a model of mlx-lm: embeddings, blocks and a norm."""
    of_text = model.get("language_model", model)
    return of_text["model"]


def _call_through(module: nn.Module, call: Callable[..., Any]) -> None:
    """Let ``call(module, plain, *inputs)`` take the calls of a module, whose class stays by name.

    A module in its place would give every parameter another name.
    """
    kind = type(module)

    def __call__(self: nn.Module, *inputs: Any, **named: Any) -> Any:  # noqa: N807
        return call(self, kind.__call__, *inputs, **named)

    namespace = {"__call__": __call__, "__module__": kind.__module__}
    module.__class__ = type(kind.__name__, (kind,), namespace)


def _axes_of(sections: tuple[int, ...], interleaved: bool) -> mx.array:
    """Return the axis that each pair of dimensions turns by, int32 [head_dim / 2]."""
    if not interleaved:
        return mx.array([axis for axis, count in enumerate(sections) for _ in range(count)])

    axes = [0] * sum(sections)
    for axis in (1, 2):
        for pair in range(axis, min(3 * sections[axis], len(axes)), 3):
            axes[pair] = axis
    return mx.array(axes)


def _is_of_mlx_lm(cache: Any) -> bool:
    """Return whether a cache keeps keys for generation, which no cache of ours does."""
    if cache is None or cache[0] is None:
        return False
    return not type(cache[0]).__module__.startswith("mlx_packs.nn")


def names_images(tokens: Any) -> bool:
    """Return whether an array of NumPy has tokens that name features of this process."""
    return isinstance(tokens, np.ndarray) and tokens.size > 0 and int(tokens.min()) <= FIRST_IMAGE
