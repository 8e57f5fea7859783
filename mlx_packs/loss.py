"""The training loss: only rows with a target reach the head.

A model is split into the part that makes hidden states and the head. The split is accepted only if
both together give the model's own logits to the bit; any other model keeps its whole forward.
"""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.nn as nn

from .batches import Batch
from .nn.segments import restarting, segment_caches
from .ops.linear_cross_entropy import cross_entropy, linear_cross_entropy
from .runtime import mx

Arrays = tuple[mx.array, ...]


@dataclass(frozen=True)
class Head:
    """``hidden``: tokens [B, T] to states [B, T, D].   ``logits``: states [n, D] to [n, V]."""

    hidden: Callable[..., mx.array]
    logits: Callable[[mx.array], mx.array]


def split_head(model: nn.Module) -> Head | None:
    """The model as hidden states and head, or None if the two do not give its logits exactly.

    Logit scaling or capping makes the check fail, and then the whole forward is used.
    """
    inner = model.get("model", model.get("transformer"))
    if not isinstance(inner, nn.Module):
        return None
    heads = [model["lm_head"]] if "lm_head" in model else []
    for name in ("embed_tokens", "wte"):
        if name in inner:
            heads.append(inner[name].as_linear)
    probe = mx.array([[1, 2, 3, 1]])
    try:
        expected, states = model(probe), inner(probe)
        for head in heads:
            if mx.array_equal(head(states), expected).item():
                return Head(inner, head)
    except (TypeError, ValueError, AttributeError):
        return None
    return None


def as_arrays(batch: Batch) -> Arrays:
    """What the step takes of a batch: tokens [B, T], positions, targets, weights [M].

    Of a packed batch also its segments [B, T].
    """
    parts = [batch.tokens, batch.positions, batch.targets, batch.weights]
    if batch.segments is not None:
        parts.append(batch.segments)
    return tuple(mx.array(p) for p in parts)


def forward(
    model: nn.Module,
    part: Callable[..., mx.array],
    tokens: mx.array,
    segments: mx.array | None = None,
    offset: int = 0,
) -> mx.array:
    """What ``part`` (the model, or its hidden states) makes of tokens [B, T].

    Args:
        segments: [B, T], where rows are packed; an input sees its own segment alone.
        offset: position of the first input of packed rows.
    """
    if segments is None:
        return part(tokens)
    with restarting(model, segments):
        return part(tokens, cache=segment_caches(model, segments, offset))


def target_nll(
    model: nn.Module,
    head: Head | None,
    tokens: mx.array,
    positions: mx.array,
    targets: mx.array,
    segments: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Negative log-likelihood [M] float32 of each target and whether it ranks first [M].

    Args:
        tokens: [B, T].   positions: [M], flat index of the input that predicts each target.
        targets: [M], token ids.   segments: [B, T], where rows are packed.
    """
    if head is None:
        logits = forward(model, model, tokens, segments)
        rows = logits.reshape(-1, logits.shape[-1])[positions]
        return cross_entropy(rows, targets), mx.argmax(rows, axis=-1) == targets
    states = forward(model, head.hidden, tokens, segments)
    rows = states.reshape(-1, states.shape[-1])[positions]
    vocab_size = getattr(getattr(model, "args", None), "vocab_size", 2**17)
    return linear_cross_entropy(rows, targets, head.logits, vocab_size)


def loss_sum(
    model: nn.Module,
    head: Head | None,
    tokens: mx.array,
    positions: mx.array,
    targets: mx.array,
    weights: mx.array,
    segments: mx.array | None = None,
) -> mx.array:
    """Sum of the targets' negative log-likelihoods; the caller divides by their number."""
    nll, _ = target_nll(model, head, tokens, positions, targets, segments)
    return (nll * weights).sum()
