"""Gated delta layers of mlx-lm (Qwen3-Next, Qwen3.5, Kimi Linear, OLMo hybrid) in training.

In training mlx-lm computes their recurrence token by token and autodiff keeps every state: 30 GB a
layer at 2,048 tokens of Qwen3-Next. Here it is `ops.gated_delta`; all else stays the layer's own.
"""

import copy
import functools
import sys
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..ops import dispatch
from ..ops.gated_delta import CHUNK, gated_delta

_NAME = "gated_delta_update"


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


def _home(module: nn.Module) -> ModuleType | None:
    """Return the Python module that calls the recurrence for a layer; None of other layers."""
    home = sys.modules.get(type(module).__module__)
    if home is None or not home.__name__.startswith("mlx_lm."):
        return None

    has_recurrence = hasattr(home, _NAME) and "A_log" in module and "dt_bias" in module
    if not has_recurrence:
        return None
    return home


@functools.cache
def _in_training(layer: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of a layer's class whose recurrence is ours in training.

    Outside training it is bit-identical to mlx-lm's if mlx-lm has a kernel or loops over few
    tokens.
    """

    class GatedDelta(layer):
        def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> Any:
            if not self.training and (x.shape[1] <= CHUNK or dispatch.detect() == "metal"):
                return super().__call__(x, *args, **kwargs)

            home = sys.modules[layer.__module__]
            theirs = getattr(home, _NAME)
            setattr(home, _NAME, _update)
            try:
                return super().__call__(x, *args, **kwargs)
            finally:
                setattr(home, _NAME, theirs)

    return GatedDelta


def gated_delta_layer(module: nn.Module) -> nn.Module | None:
    """Return a layer with the same parameters that trains by chunks; None of other layers."""
    if _home(module) is None:
        return None
    layer = copy.copy(module)
    layer.__class__ = _in_training(type(module))
    return layer
