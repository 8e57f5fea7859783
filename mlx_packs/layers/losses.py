"""Losses of a `LayerTrainer`: batches, forwards and cross-entropy of graphs that a user writes."""

from collections.abc import Callable, Sequence

import numpy as np

from ..errors import PackError
from ..ops.linear_cross_entropy import cross_entropy
from ..runtime import mx
from .registered import RegisteredLayer, shown

IGNORED = -100  # marks a position without a target, as in other tools

Forward = Callable[[mx.array], mx.array]
LMBatch = tuple[mx.array, mx.array, mx.array]


class LMLoss:
    """Cross-entropy of the logits that a forward computes."""

    def __init__(self, forward: Forward, z_loss: float, label_smoothing: float) -> None:
        self.vocab_size = 0  # last axis of the logits, known after the first call
        self._forward = forward
        self._z_loss = z_loss
        self._label_smoothing = label_smoothing

    def __call__(
        self, inputs: mx.array, targets: mx.array, weights: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Return the weighted sum of the losses, and the sum of the weights."""
        logits = self._forward(inputs)
        if not isinstance(logits, mx.array) or logits.shape[:-1] != targets.shape:
            raise PackError(
                f"targets: shape {list(targets.shape)} requires logits of shape "
                f"{[*targets.shape, 'V']}, but the layers return {shown(logits)}.",
                flag="targets",
            )

        self.vocab_size = logits.shape[-1]
        loss = cross_entropy(
            logits.reshape(-1, self.vocab_size),
            targets.reshape(-1),
            self._z_loss,
            self._label_smoothing,
        )
        return (loss * weights.reshape(-1)).sum(), weights.sum()

    def check_targets(self, targets: mx.array) -> None:
        """Check that token ids are among the logits."""
        lowest = targets.min().item()
        highest = targets.max().item()
        if lowest < 0 or highest >= self.vocab_size:
            token = lowest if lowest < 0 else highest
            raise PackError(
                f"targets: token {token} is outside the {self.vocab_size} logits.", flag="targets"
            )


class UserLoss:
    """A loss that a user wrote: a function of a batch's arrays that returns its mean loss."""

    def __init__(self, function: Callable[..., mx.array]) -> None:
        self._function = function

    def __call__(self, *arrays: mx.array) -> tuple[mx.array, mx.array]:
        """Return the loss, and 1: accumulated batches count alike."""
        loss = self._function(*arrays)
        if not isinstance(loss, mx.array) or loss.ndim:
            raise PackError(f"loss: must return a scalar, but returned {shown(loss)}.", flag="loss")
        return loss, mx.array(1.0)


def sequence_forward(layers: Sequence[RegisteredLayer], inputs: mx.array) -> Forward:
    """Return layers applied one after the other, after a check of their widths."""
    if not isinstance(inputs, mx.array | np.ndarray) or inputs.shape[-1:] != (
        layers[0].in_features,
    ):
        raise PackError(
            f"inputs: '{layers[0].name}' expects width {layers[0].in_features}, but got "
            f"{shown(inputs)}.",
            flag="inputs",
        )

    for before, after in zip(layers, layers[1:], strict=False):
        if before.out_features != after.in_features:
            raise PackError(
                f"layers: '{after.name}' expects width {after.in_features}, but '{before.name}' "
                f"before it returns {before.out_features}.",
                flag="layers",
            )

    def forward(x: mx.array) -> mx.array:
        for layer in layers:
            x = layer(x)
        return x

    return forward


def lm_batch(
    inputs: mx.array, targets: mx.array, mask: mx.array | None, weights: mx.array | None
) -> LMBatch:
    """Return inputs, targets, weights; a position without a target gets token 0 with weight 0."""
    tokens = np.array(targets)
    if tokens.dtype.kind not in "iu":
        raise PackError(f"targets: must be token ids, but are {tokens.dtype}.", flag="targets")

    scale = (tokens != IGNORED).astype(np.float32)
    for name, values in (("mask", mask), ("weights", weights)):
        if values is None:
            continue
        factors = np.array(mx.array(values).astype(mx.float32))
        if factors.shape != tokens.shape:
            raise PackError(
                f"{name}: is of shape {list(factors.shape)}, but targets are of shape "
                f"{list(tokens.shape)}.",
                flag=name,
            )

        if name == "mask":
            factors = (factors != 0).astype(np.float32)
        if not np.isfinite(factors).all() or (factors < 0).any():
            raise PackError("weights: must be finite and 0 or more.", flag="weights")
        scale = scale * factors

    if not scale.any():
        raise PackError(
            "targets: there is none. All are -100, masked or of weight 0.", "data", "targets"
        )

    tokens = np.where(scale > 0, tokens, 0)
    return mx.array(inputs), mx.array(tokens.astype(np.int64)), mx.array(scale)
