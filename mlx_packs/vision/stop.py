"""What enters the projector of a tower of mlx-vlm, for each feature that would leave it.

A tower may change the order of what its projector returns, and leave out padding. So the projector
returns the numbers of its rows, and these tell which of them became features.
"""

import math
from collections.abc import Callable, Sequence

import mlx.nn as nn
from mlx.utils import tree_unflatten

from ..runtime import mx

# Digits of the numbers of rows, which every float dtype has exactly.
_BASE = 256
_DIGITS = 3


class Stop:
    """Stands in for the linears of a projector, to tell what enters the first one.

    Args:
        model: of mlx-vlm; its linears are replaced.
        paths: of them, in order.
    """

    def __init__(self, model: nn.Module, paths: Sequence[str]) -> None:
        first = paths[0]
        last = paths[-1]
        self.width = dict(model.named_modules())[last].weight.shape[0]
        self.inputs: mx.array | None = None

        stand_ins = {first: _StandIn(self.keep), last: _StandIn(self.number)}
        if first == last:
            stand_ins = {first: _StandIn(lambda inputs: self.number(self.keep(inputs)))}
        model.update_modules(tree_unflatten(list(stand_ins.items())))

    def keep(self, inputs: mx.array) -> mx.array:
        """Keep what enters the projector, [..., C]."""
        self.inputs = inputs
        return inputs

    def number(self, states: mx.array) -> mx.array:
        """Return the number of each row of states [..., C] in place of its features [..., D]."""
        shape = states.shape[:-1]
        numbers = mx.arange(math.prod(shape))
        digits = [numbers // _BASE**place % _BASE for place in range(_DIGITS)]
        zeros = [mx.zeros_like(numbers)] * (self.width - _DIGITS)
        return mx.stack(digits + zeros, axis=1).reshape(*shape, self.width).astype(states.dtype)

    def rows(self, features: mx.array) -> mx.array:
        """Return what entered for features [n, D] that are numbers: [n, C]."""
        places = mx.array([_BASE**place for place in range(_DIGITS)], mx.float32)
        numbers = (features[:, :_DIGITS].astype(mx.float32) * places).sum(axis=1)
        inputs = self.inputs.reshape(-1, self.inputs.shape[-1])
        return inputs[numbers.astype(mx.int32)]


class _StandIn(nn.Module):
    """A function in the place of a linear."""

    def __init__(self, function: Callable[[mx.array], mx.array]) -> None:
        super().__init__()
        self.function = function

    def __call__(self, x: mx.array) -> mx.array:
        return self.function(x)
