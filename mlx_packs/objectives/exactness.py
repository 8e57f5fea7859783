"""Packed rows and common prefixes: whether a model computes each example as if it were alone.

Nothing is assumed of a family. Two short examples are packed, at the begin and at the end of the
longest sequence of the run, and must come out as each does alone. Two short rows that begin alike
are computed as a tree, whose prefix is in two levels, and must have the loss and the gradients that
each has alone.
"""

import itertools
import math
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map

from ..adapters.trainable import Trainable
from ..data.dataset import Layout, Tree
from ..data.shapes import sequence_inputs
from ..errors import PackError
from ..nn.blocks import attends_by_spans
from ..nn.lora import InputDropout
from ..nn.segments import segment_numbers
from ..nn.wrapped import NoisyEmbedding
from ..runtime import mx
from .causal_lm import Head, forward, part_of, target_loss
from .objective import Inputs

_PREFIX = 8  # inputs that both rows of the probe begin with
_ROOT = 4  # of them in the level before prefixes
_SUFFIX = 5  # inputs that follow
# What rounding does to loss and gradients: at 36 layers 1.5e-2 in bfloat16, 2.5e-3 in float16.
_ROUNDING = {mx.float32: 1e-4, mx.float16: 1e-2, mx.bfloat16: 4e-2}
_WORST = 10  # a single gradient may be off by so much more: 0.18 in bfloat16
_NEGLIGIBLE = 1e-3  # of the largest gradient's length: shorter ones may be rounding alone

Gradients = dict[str, mx.array]
_PROBE = (9, 7)  # tokens of the two examples
TOLERANCE = {mx.float32: 1e-4, mx.float16: 1e-2, mx.bfloat16: 5e-2}
_ROTARY_ERROR = 1e-6  # an angle in float32 loses this much for each position


def why_not_shared(model: nn.Module, head: Head | None, vocab_size: int) -> str | None:
    """Return why a tree differs from its rows, in a line; None if it does not.

    ``model`` is as it trains: with its adapters and its activation checkpointing.
    """
    rows, tree = _probe(vocab_size)
    layout = Tree(1, _PREFIX, root=_ROOT)
    part = part_of(model, head)
    allowed = _ROUNDING[forward(model, part, rows[0]["tokens"]).dtype]

    with _without_noise(model):
        of_rows = [_loss_and_gradients(model, head, row) for row in rows]
        try:
            loss, gradients = _loss_and_gradients(model, head, tree, layout)
        except (TypeError, ValueError, AttributeError, IndexError, KeyError, RuntimeError) as error:
            return f"it does not take the caches of a prefix: {textwrap.shorten(str(error), 120)}"

    expected = tree_map(mx.add, *(own for _, own in of_rows))
    name, worst, together = _differences(gradients, expected)
    checks = [
        ("loss", abs(loss / sum(own for own, _ in of_rows) - 1), allowed),
        ("gradient", together, allowed),
        (f"gradient of {name}", worst, _WORST * allowed),
    ]
    for what, difference, most in checks:
        if not difference <= most:
            return f"its {what} is off by {difference:.1e}, where {most:.1e} is rounding"
    return None


def why_length_matters(model: nn.Module, inputs: int) -> str | None:
    """Return why a row of so many inputs turns them in another way than its parts do.

    RoPE that is scaled by the length of a row (dynamic NTK) does so beyond the context that a
    model was trained with. None if no module does; a tree is exact then.
    """
    for module in model.modules():
        kind = type(module).__name__
        if kind == "DynamicNTKScalingRoPE" and inputs > module.max_position_embeddings:
            return f"its {kind} depends on the length of a row, at {inputs:,} inputs"
    return None


def _probe(vocab_size: int) -> tuple[list[Inputs], dict[str, mx.array]]:
    """Return two rows with a target at each input, and both as a tree."""
    tokens = np.random.default_rng(0).integers(0, vocab_size, (2, _PREFIX + _SUFFIX + 1))
    tokens[1, :_PREFIX] = tokens[0, :_PREFIX]
    inputs = tokens[:, :-1]
    targets = tokens[:, 1:]

    places = np.arange(inputs.shape[1])
    rows = [
        {"tokens": inputs[i : i + 1], "positions": places, "targets": targets[i]} for i in range(2)
    ]
    suffixes = np.arange(2)[:, None] * _SUFFIX
    positions = np.where(places < _PREFIX, places, places + suffixes)
    tree = {
        "root": inputs[:1, :_ROOT],
        "prefix": inputs[:1, _ROOT:_PREFIX],
        "tokens": inputs[:, _PREFIX:],
        "positions": positions.reshape(-1),
        "targets": targets.reshape(-1),
    }
    return [_arrays(row) for row in rows], _arrays(tree)


def _arrays(inputs: dict[str, np.ndarray]) -> dict[str, mx.array]:
    return {name: mx.array(values.astype(np.int32)) for name, values in inputs.items()}


def _loss_and_gradients(
    model: nn.Module, head: Head | None, inputs: Inputs, layout: Layout = ()
) -> tuple[float, Gradients]:
    """Return the sum of the losses, and the gradients of what is trainable, if anything is."""

    def loss() -> mx.array:
        return target_loss(model, head, inputs, layout)[0].sum()

    if not tree_flatten(model.trainable_parameters()):
        return loss().item(), {}
    value, gradients = nn.value_and_grad(model, loss)()
    mx.eval(value, gradients)
    return value.item(), dict(tree_flatten(gradients))


def _differences(actual: Gradients, expected: Gradients) -> tuple[str, float, float]:
    """Return the worst gradient and its error, and the error of all, as shares of their lengths."""
    if not expected:
        return "", 0.0, 0.0
    errors = {name: _length(actual[name] - tensor) for name, tensor in expected.items()}
    lengths = {name: _length(tensor) for name, tensor in expected.items()}
    least = _NEGLIGIBLE * max(lengths.values()) + 1e-9
    shares = {name: error / max(lengths[name], least) for name, error in errors.items()}

    worst = max(shares, key=shares.__getitem__)
    together = math.hypot(*errors.values()) / (math.hypot(*lengths.values()) + 1e-9)
    return worst, shares[worst], together


def _length(tensor: mx.array) -> float:
    return mx.linalg.norm(tensor.astype(mx.float32).reshape(-1)).item()


@contextmanager
def _without_noise(model: nn.Module) -> Iterator[None]:
    """Let a model be in training mode, and draw nothing."""
    training = model.training
    dropouts = [d for m in model.modules() for d in vars(m).values() if isinstance(d, InputDropout)]
    shares = [dropout.p for dropout in dropouts]

    model.train()
    for module in model.modules():
        if isinstance(module, NoisyEmbedding | nn.Dropout):
            module.eval()
    for dropout in dropouts:
        dropout.p = 0.0

    try:
        yield
    finally:
        model.train(training)
        for dropout, share in zip(dropouts, shares, strict=True):
            dropout.p = share


def check_packing(
    attached: Trainable, head: Head | None, max_seq_length: int, vocab_size: int
) -> None:
    """Raise a PackError for a model whose packed examples would see each other."""
    inputs = sequence_inputs(max_seq_length)
    if reason := why_not_packed(attached.model, head, inputs, vocab_size):
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
