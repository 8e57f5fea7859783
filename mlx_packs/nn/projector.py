"""The last linears of a frozen vision tower, which may have adapters."""

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn


class Projector(nn.Module):
    """Linears ``linear_1``, ``linear_2`` ... with GELU between them.

    Args:
        linears: as the tower has them; the first one maps C to its width, the last one to D.
    """

    def __init__(self, linears: Sequence[nn.Module]) -> None:
        super().__init__()
        self._names = [f"linear_{number}" for number in range(1, len(linears) + 1)]
        for name, linear in zip(self._names, linears, strict=True):
            self[name] = linear

    def __call__(self, inputs: mx.array) -> mx.array:
        """Map what enters the projector [N, C] to features [N, D]."""
        first, *others = self._names
        features = self[first](inputs)
        for name in others:
            features = self[name](nn.gelu(features))
        return features
