"""Packed examples: attention masks by segment, so that no example sees another.

Models of mlx-lm ask their cache for the attention mask, so a cache without memory that returns the
mask of the segments packs any of them. Rotary positions are relative and stay as they are; models
with a table of learned positions are not packed.
"""

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..ops.span_attention import Spans


class SegmentCache:
    """Takes the place of mlx-lm's KV cache: keeps nothing and masks by segment.

    Args:
        segments: int [B, T], rising along a sequence; or for each sequence the inputs of its
            segments, `spans` then.
        offset: position of the first input.
        head_axes: number of axes between B and T in the attention scores, and so in the mask.
    """

    def __init__(self, segments: mx.array | Spans, offset: int = 0, head_axes: int = 1) -> None:
        self.spans = None
        if not isinstance(segments, mx.array):
            self.spans = segments
        self.segments = segment_numbers(segments)
        self.offset = offset
        self.head_axes = head_axes
        # the last mask without a window; an attention that gets it may use the segments instead
        self.unwindowed: mx.array | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return keys, values

    def make_mask(
        self,
        N: int,  # noqa: N803 - mlx-lm passes it by this name
        return_array: bool = True,
        window_size: int | None = None,
    ) -> mx.array:
        """Return a boolean mask [B, 1, N, N]: same segment, not later, in the window."""
        places = mx.arange(N)
        distance = places[:, None] - places[None]
        seen = distance >= 0
        if window_size is not None:
            seen = seen & (distance < window_size)

        same = self.segments[:, :, None] == self.segments[:, None, :]
        mask = mx.expand_dims(same & seen, list(range(1, 1 + self.head_axes)))
        if window_size is None:
            self.unwindowed = mask
        return mask


def segment_caches(
    model: nn.Module, segments: mx.array | Spans, offset: int = 0
) -> list[SegmentCache]:
    """Return as many caches as the model would make for itself."""
    from mlx_lm.models.cache import make_prompt_cache

    head_axes = 1
    if type(model).__module__ == "mlx_lm.models.gemma2":  # its scores are [B, KV, H / KV, T, T]
        head_axes += model.args.num_attention_heads != model.args.num_key_value_heads
    cache = SegmentCache(segments, offset, head_axes)
    return [cache for _ in make_prompt_cache(model)]


def segment_numbers(segments: mx.array | Spans) -> mx.array:
    """Return the number of each input's segment, int32 [B, T]; spans cover their sequences."""
    if isinstance(segments, mx.array):
        return segments
    rows = [np.repeat(np.arange(len(spans), dtype=np.int32), spans) for spans in segments]
    return mx.array(np.stack(rows))
