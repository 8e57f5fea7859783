"""The modules of a base that others replace while adapters are on it."""

import copy
import functools
import itertools
import sys
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ..ops import dispatch
from ..ops.gated_delta import CHUNK, gated_delta


class GroupedBlock(nn.Module):
    """A block whose projections of one input are a group."""

    recompute = False  # whether the backward computes the operations between its groups again


@dataclass(frozen=True)
class BlockKind:
    """A kind of block that a `GroupedBlock` replaces."""

    shared: tuple[str, ...]  # projections that read the input of the block
    last: str  # the projection that reads what these become


ATTENTION = BlockKind(("q_proj", "k_proj", "v_proj"), "o_proj")
MLP = BlockKind(("gate_proj", "up_proj"), "down_proj")
_KINDS = {"Attention": ATTENTION, "MLP": MLP}
# Modules of mlx-lm whose attention has q_proj, k_proj, v_proj, o_proj, rope, scale (and q_norm,
# k_norm of a head).
_FAMILIES = ("mlx_lm.models.qwen3", "mlx_lm.models.qwen2", "mlx_lm.models.llama")
_RECURRENCE = "gated_delta_update"  # of Qwen3-Next, Qwen3.5, Kimi Linear, OLMo hybrid


def block_kind(module: nn.Module | None) -> BlockKind | None:
    """Return the kind of an attention or feed-forward of mlx-lm; None of other modules."""
    if type(module).__module__ not in _FAMILIES:
        return None
    return _KINDS.get(type(module).__name__)


def recurrent_layer(module: nn.Module) -> nn.Module | None:
    """Return what a gated delta layer of mlx-lm is replaced by; None of other modules.

    It has the same parameters, and trains by chunks.
    """
    home = sys.modules.get(type(module).__module__)
    if home is None or not home.__name__.startswith("mlx_lm.") or not hasattr(home, _RECURRENCE):
        return None
    if "A_log" not in module or "dt_bias" not in module:
        return None

    layer = copy.copy(module)
    layer.__class__ = _in_training(type(module))
    return layer


@functools.cache
def _in_training(layer: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of a layer's class whose recurrence is `ops.gated_delta` in training.

    In training mlx-lm computes it token by token and autodiff keeps every state: 30 GB a layer at
    2,048 tokens of Qwen3-Next. Outside training it is bit-identical to mlx-lm's if mlx-lm has a
    kernel or loops over few tokens.
    """

    class GatedDelta(layer):
        def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> Any:
            if not self.training and (x.shape[1] <= CHUNK or dispatch.detect() == "metal"):
                return super().__call__(x, *args, **kwargs)

            home = sys.modules[layer.__module__]
            theirs = getattr(home, _RECURRENCE)
            setattr(home, _RECURRENCE, _update)
            try:
                return super().__call__(x, *args, **kwargs)
            finally:
                setattr(home, _RECURRENCE, theirs)

    return GatedDelta


def _update(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    A_log: mx.array,  # noqa: N803 - mlx-lm's name
    dt_bias: mx.array,
    *optional: mx.array | None,
    **named: Any,
) -> tuple[mx.array, mx.array]:
    """Return the result of mlx-lm's function of these arguments: ``state`` and ``mask`` follow."""
    options = dict(zip(("state", "mask"), optional, strict=False)) | named
    factor = 2.0 if options.get("allow_neg_eigval") else 1.0
    beta = mx.sigmoid(b) * factor

    rate = mx.exp(A_log.astype(mx.float32))
    if (lowest := options.get("lower_bound")) is None:
        log_decay = -rate * nn.softplus(a + dt_bias)
    else:
        log_decay = lowest * mx.sigmoid(rate * (a.astype(mx.float32) + dt_bias))

    return gated_delta(q, k, v, log_decay, beta, options.get("state"), options.get("mask"))


def block_prefixes(model: nn.Module) -> list[str]:
    """Return the paths of the transformer blocks, in order; they are ``model.layers``."""
    paths = {id(m): path for path, m in model.named_modules()}
    return [paths[id(block)] for block in model.layers]


def replace_modules(model: nn.Module, modules: list[tuple[str, nn.Module]]) -> None:
    """Put each module at its path; one inside another goes into the new one."""

    def depth(item: tuple[str, nn.Module]) -> int:
        return item[0].count(".")

    for _, level in itertools.groupby(sorted(modules, key=depth), key=depth):
        model.update_modules(tree_unflatten(list(level)))
