"""Losses of a `LayerTrainer`, and their compiled steps, one for each."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.optimizers as optimizers
import numpy as np

from ..data.dataset import Batch, Layout
from ..objectives.objective import Inputs
from ..ops.linear_cross_entropy import cross_entropy
from ..runtime import mx
from ..training.step import Stepper
from .registered import RegisteredLayer, adapters_module, shown, wrong

_MOST_GRAPHS = 8  # kept compiled at a time

IGNORED = -100  # marks a position without a target, as in other tools

Loss = Callable[..., tuple[mx.array, mx.array]]
Forward = Callable[[mx.array], mx.array]
LMBatch = tuple[mx.array, mx.array, mx.array]


@dataclass(frozen=True)
class LossGraph:
    """A loss that is stepped."""

    stepper: Stepper
    loss: Loss  # as it was first passed
    names: frozenset[str]  # of the layers that take part in it
    source: object  # passed by the user; referenced so that its id is not reused


class GraphCache(dict[object, LossGraph]):
    """The graphs that were stepped last, by the loss that they compute.

    ``called`` receives the name of each layer that is called.
    """

    def __init__(
        self,
        layers: dict[str, RegisteredLayer],
        called: set[str],
        optimizer: optimizers.Optimizer,
        max_grad_norm: float | None,
    ) -> None:
        super().__init__()
        self._layers = layers
        self._called = called
        self._optimizer = optimizer
        self._max_grad_norm = max_grad_norm
        self._idle: set[str] = set()  # layers that were warned of

    def graph(self, source: object, loss: Loss, batch: tuple) -> LossGraph:
        """Return the graph of a loss, made when its layers or its function are first passed.

        Which layers take part is found by calling the loss, without computing anything.
        """
        key = (type(loss), _key(source))
        if key in self:
            self[key] = self.pop(key)  # the newest is last
            return self[key]

        if not self._layers:
            raise wrong("layers", "none is registered.", "not-found")

        names = self._participants(loss, batch)
        if not isinstance(source, (list, tuple)):
            self._warn_of_idle(names)

        def checked(inputs: Inputs, layout: Layout) -> tuple[mx.array, mx.array]:
            self._called.clear()
            result = loss(*(inputs[str(i)] for i in range(len(inputs))))
            if self._called != names:
                other = ", ".join(sorted(self._called ^ names))
                raise wrong(
                    "layers",
                    f"{other} took part in one step of this function and not in another. "
                    "Make it two functions.",
                    "conflict",
                )
            return result

        module = adapters_module(layer for n, layer in self._layers.items() if n in names)
        stepper = Stepper(module, checked, self._optimizer, self._max_grad_norm)

        if len(self) == _MOST_GRAPHS:
            idle = next(k for k, graph in self.items() if not graph.stepper.waiting)
            del self[idle]

        self[key] = LossGraph(stepper, loss, names, source)
        return self[key]

    def _participants(self, loss: Loss, batch: tuple) -> frozenset[str]:
        self._called.clear()
        loss(*batch)
        if not self._called:
            raise wrong(
                "layers",
                "no registered layer takes part in this loss. Call what register returned, "
                "not the linear itself.",
                "not-found",
            )
        return frozenset(self._called)

    def _warn_of_idle(self, names: frozenset[str]) -> None:
        idle = [n for n in self._layers if n not in names and n not in self._idle]
        if idle:
            self._idle |= set(idle)
            warnings.warn(
                f"LayerTrainer: {', '.join(idle)}: takes no part in this step and gets no update.",
                stacklevel=4,
            )


def batch_of(arrays: Sequence[mx.array], count: float) -> Batch:
    """Return the arrays of a loss as a batch; their names are their numbers."""
    inputs = {str(i): array for i, array in enumerate(arrays)}
    return Batch(inputs, round(count), count)


def _key(source: object) -> object:
    """Return the key of a graph: the layers of a sequence, or the function itself."""
    if isinstance(source, (list, tuple)):
        return tuple(part if isinstance(part, str) else id(part) for part in source)
    try:
        hash(source)
    except TypeError:
        return id(source)
    return source


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
            raise wrong(
                "targets",
                f"shape {list(targets.shape)} requires logits of shape "
                f"{[*targets.shape, 'V']}, but the layers return {shown(logits)}.",
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
            raise wrong("targets", f"token {token} is outside the {self.vocab_size} logits.")


def user_loss(function: Callable[..., mx.array]) -> Loss:
    """Return the loss of a function of a batch's arrays that returns its mean loss."""

    def loss(*arrays: mx.array) -> tuple[mx.array, mx.array]:
        mean = function(*arrays)
        if not isinstance(mean, mx.array) or mean.ndim:
            raise wrong("loss", f"must return a scalar, but returned {shown(mean)}.")
        # a weight of 1: accumulated batches count alike
        return mean, mx.array(1.0)

    return loss


def sequence_forward(layers: Sequence[RegisteredLayer]) -> Forward:
    """Return layers applied one after the other."""

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
        raise wrong("targets", f"must be token ids, but are {tokens.dtype}.")

    scale = (tokens != IGNORED).astype(np.float32)
    for name, values in (("mask", mask), ("weights", weights)):
        if values is None:
            continue
        factors = np.array(mx.array(values).astype(mx.float32))
        if factors.shape != tokens.shape:
            raise wrong(
                name,
                f"is of shape {list(factors.shape)}, but targets are of shape "
                f"{list(tokens.shape)}.",
            )

        if name == "mask":
            factors = (factors != 0).astype(np.float32)
        if not np.isfinite(factors).all() or (factors < 0).any():
            raise wrong("weights", "must be finite and 0 or more.")
        scale = scale * factors

    if not scale.any():
        raise wrong("targets", "there is none. All are -100, masked or of weight 0.", "data")

    tokens = np.where(scale > 0, tokens, 0)
    return mx.array(inputs), mx.array(tokens.astype(np.int64)), mx.array(scale)
