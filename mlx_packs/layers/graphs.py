"""Compiled steps of a `LayerTrainer`, one for each loss that it steps."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.optimizers as optimizers

from ..data.dataset import Batch, Layout
from ..errors import PackError
from ..objectives.objective import Inputs
from ..runtime import mx
from ..training.step import Stepper
from .registered import RegisteredLayer, adapters_module

_MOST_GRAPHS = 8  # kept compiled at a time

Loss = Callable[..., tuple[mx.array, mx.array]]


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
            raise PackError("layers: none is registered.", "not-found", "layers")

        names = self._participants(loss, batch)
        if not isinstance(source, (list, tuple)):
            self._warn_of_idle(names)

        def checked(inputs: Inputs, layout: Layout) -> tuple[mx.array, mx.array]:
            self._called.clear()
            result = loss(*(inputs[str(i)] for i in range(len(inputs))))
            if self._called != names:
                other = ", ".join(sorted(self._called ^ names))
                raise PackError(
                    f"layers: {other} took part in one step of this function and not in another. "
                    "Make it two functions.",
                    "conflict",
                    "layers",
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
            raise PackError(
                "layers: no registered layer takes part in this loss. Call what register returned, "
                "not the linear itself.",
                "not-found",
                "layers",
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
