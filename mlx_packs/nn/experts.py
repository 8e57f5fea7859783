"""Switch linears: mlx-lm's stacked experts of a mixture, with an adapter for each expert.

The weight is [E, O, D], dense or quantized; a call takes the expert of each row. The adapter has
A [E, D, R] and B [E, R, O], and a row meets those of its own expert only.
"""

import mlx.core as mx
import mlx.nn as nn

from .lora import GroupedLoRA

_MODULE = "mlx_lm.models.switch_layers"
_NAMES = ("SwitchLinear", "QuantizedSwitchLinear")


def is_switch_linear(module: nn.Module) -> bool:
    """Return whether a module is mlx-lm's stack of experts, dense or quantized."""
    return type(module).__module__ == _MODULE and type(module).__name__ in _NAMES


class AdaptedSwitchLinear(nn.Module):
    """A frozen switch linear with an adapter for each expert; called as the switch linear is."""

    def __init__(self, linear: nn.Module, lora: GroupedLoRA) -> None:
        super().__init__()
        self.linear = linear
        self.lora = lora

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """Map x [..., 1, D] and the expert of each row, [...], to [..., 1, O]."""
        output = self.linear(x, indices, sorted_indices=sorted_indices)
        return self.lora.of_experts(x, output, indices, sorted_indices)
