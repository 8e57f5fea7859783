"""The focal loss (https://arxiv.org/abs/1708.02002)."""

from ..ops.linear_cross_entropy import cross_entropy
from ..runtime import mx


def focal_loss(logits: mx.array, targets: mx.array, gamma: float) -> mx.array:
    """Return (1 - p)^gamma * -log p of each target [M], of logits [M, V]; gamma 0 is -log p."""
    nll = cross_entropy(logits, targets)
    return (1 - mx.exp(-nll)) ** gamma * nll
