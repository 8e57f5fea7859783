"""Sequence packing: whether a model computes each packed example as if it were alone.

Nothing is assumed of a family: two short examples are packed, at the begin and at the end of the
longest sequence of the run, and must come out as each does alone.
"""

import itertools

import mlx.nn as nn
import numpy as np

from ..adapters.trainable import Trainable
from ..data.shapes import sequence_inputs
from ..errors import PackError
from ..nn.blocks import attends_by_spans
from ..nn.segments import RestartedPositions, segment_numbers
from ..runtime import mx
from .causal_lm import Head, forward, part_of

_LEARNED_POSITIONS = ("wpe",)  # gpt2 and gpt_bigcode are all of mlx-lm that have them
_PROBE = (9, 7)  # tokens of the two examples
TOLERANCE = {mx.float32: 1e-4, mx.float16: 1e-2, mx.bfloat16: 5e-2}
_ROTARY_ERROR = 1e-6  # an angle in float32 loses this much for each position


def prepare_packing(
    attached: Trainable, head: Head | None, max_seq_length: int, vocab_size: int
) -> None:
    """Let learned positions start again in each segment, and check that packing is exact.

    Raises a PackError for a model whose packed examples would see each other.
    """
    model = attached.model
    modules = model.named_modules()
    learned = [(p, m) for p, m in modules if p.rpartition(".")[2] in _LEARNED_POSITIONS]
    attached.swap([(path, RestartedPositions(module)) for path, module in learned])

    if reason := why_not_packed(model, head, sequence_inputs(max_seq_length), vocab_size):
        family = attached.base.config.get("model_type", attached.base.name)
        raise PackError(
            f"--packing: a {family} model does not compute packed examples exactly ({reason}). "
            "Train with --no-packing.",
            "unsupported",
        )


def why_not_packed(model: nn.Module, head: Head | None, limit: int, vocab_size: int) -> str | None:
    """Return why packed sequences of ``limit`` inputs differ from examples alone, or None."""
    from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

    kinds = {type(cache) for cache in make_prompt_cache(model)}
    if others := kinds - {KVCache, RotatingKVCache}:
        names = ", ".join(sorted(kind.__name__ for kind in others))
        return f"it keeps more than keys and values: {names}"

    part = part_of(model, head)
    tokens = mx.array(np.random.default_rng(0).integers(0, vocab_size, (2, sum(_PROBE))))
    spans = (_PROBE, _PROBE)
    ways = [segment_numbers(spans)]
    if attends_by_spans(model):
        ways.append(spans)

    training = model.training
    model.eval()
    try:
        alone = mx.concatenate(
            [forward(model, part, row) for row in mx.split(tokens, [_PROBE[0]], axis=1)], axis=1
        )
        offsets = {0, max(0, limit - sum(_PROBE))}
        for offset, segments in itertools.product(offsets, ways):
            try:
                packed = forward(model, part, tokens, segments, offset)
                difference = relative_error(packed, alone)
            except (TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
                return f"it does not take a mask of segments: {' '.join(str(error).split())}"
            allowed = TOLERANCE[alone.dtype] + offset * _ROTARY_ERROR
            if not difference <= allowed:
                return (
                    f"off by {difference:.1e} at position {offset}, where {allowed:.1e} is rounding"
                )
    finally:
        model.train(training)
    return None


def relative_error(actual: mx.array, expected: mx.array) -> float:
    """Return the largest error of a position's vector, as a share of that vector's length."""
    actual = actual.astype(mx.float32)
    expected = expected.astype(mx.float32)
    lengths = mx.linalg.norm(expected, axis=-1)
    return (mx.linalg.norm(actual - expected, axis=-1) / (lengths + 1e-9)).max().item()
