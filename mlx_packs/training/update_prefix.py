"""The prefix that the batches of an update begin with, which is computed once for all of them.

Its keys, values and states are arguments of the steps on the rows that follow. Gradients by these
are summed, and with the update one backward pass takes the sum through the prefix. No weight
changes in between, so the gradients are as if each tree computed its prefix.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map

from ..data.dataset import Batch, Layout, Tree
from ..nn.prefix import names_with_gradient
from ..objectives.objective import Inputs, KeepPrefixes
from ..runtime import mx

Pending = tuple  # count and gradients of the steps so far; empty before the first


class UpdatePrefix:
    """The prefix of the update at work, while one is open; ``loss`` is from `Update.guarded`."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., tuple],
        is_scaled: bool,
        keep_prefixes: KeepPrefixes,
        compiled: Callable[[Callable], Callable],
    ) -> None:
        self._model = model
        self._loss = loss
        self._is_scaled = is_scaled
        self._keep_prefixes = keep_prefixes

        self._kept: dict[str, mx.array] = {}  # what the rows read
        self._sums: dict[str, mx.array] = {}  # gradients by those of them that depend on parameters
        self._tokens: mx.array | None = None  # of the open prefix
        self._prefix: Any = None  # the same as a batch has it

        self._keep = compiled(lambda tokens: dict(keep_prefixes(tokens)))
        self._step = compiled(self._stepped)
        self._close = compiled(self._closed)

    @property
    def is_open(self) -> bool:
        """Whether a backward pass through a prefix is due."""
        return self._tokens is not None

    def serves(self, batch: Batch, is_whole_update: bool) -> bool:
        """Return whether a batch is to read a prefix that other steps of its update read, too."""
        recurs = isinstance(batch.layout, Tree) and batch.layout.recurs
        return recurs and (self.is_open or not is_whole_update)

    def has(self, batch: Batch) -> bool:
        """Return whether a batch has the open prefix."""
        return self.is_open and np.array_equal(self._prefix, batch.inputs["prefix"])

    def begin(self, batch: Batch, inputs: Inputs) -> list[mx.array]:
        """Compute the prefix of a batch; return arrays to evaluate before its rows are computed."""
        self._tokens = inputs["prefix"]
        self._prefix = batch.inputs["prefix"]
        self._kept = self._keep(self._tokens)

        names = names_with_gradient(self._model, self._kept)
        self._sums = {name: mx.zeros(self._kept[name].shape) for name in names}
        return list(self._kept.values())

    def step(
        self, pending: Pending, inputs: Inputs, layout: Layout
    ) -> tuple[mx.array, Pending, list[mx.array]]:
        """Return the loss of rows, what is pending after them, and more arrays to evaluate."""
        total, pending, self._sums = self._step(pending, self._sums, self._kept, inputs, layout)
        return total, pending, list(self._sums.values())

    def close(self, pending: Pending) -> Pending:
        """Return what is pending once the gradients went through the prefix, too."""
        gradients = {name: sums.astype(self._kept[name].dtype) for name, sums in self._sums.items()}
        tokens = self._tokens
        self._tokens = None
        self._kept = {}
        self._sums = {}
        return self._close(pending, tokens, gradients)

    def _stepped(
        self,
        pending: Pending,
        sums: dict[str, mx.array],
        kept: dict[str, mx.array],
        inputs: Inputs,
        layout: Layout,
    ) -> tuple[mx.array, Pending, dict[str, mx.array]]:
        def loss(parameters: dict, learned: dict[str, mx.array]) -> tuple:
            self._model.update(parameters)
            return self._loss({**inputs, "kept": kept | learned}, layout)

        parameters = self._model.trainable_parameters()
        learned = {name: kept[name] for name in sums}
        values, (grads, of_kept) = mx.value_and_grad(loss, argnums=(0, 1))(parameters, learned)
        self._model.update(parameters)

        if self._is_scaled:  # then the second value has the unscaled sum and its count
            values = values[1]
        total, count = values
        if pending:
            count = pending[0] + count
            grads = tree_map(mx.add, pending[1], grads)
        # in float32, as half precision would lose the smaller ones of many batches
        sums = {name: sums[name] + of_kept[name].astype(mx.float32) for name in sums}
        return total, (count, grads), sums

    def _closed(
        self, pending: Pending, tokens: mx.array, gradients: dict[str, mx.array]
    ) -> Pending:
        parameters = self._model.trainable_parameters()
        values = [array for _, array in tree_flatten(parameters)]

        def kept(*arrays: mx.array) -> list[mx.array]:
            self._model.update(_in_place_of(parameters, arrays))
            of_prefix = self._keep_prefixes(tokens)
            return [of_prefix[name] for name in gradients]

        _, grads = mx.vjp(kept, values, list(gradients.values()))
        self._model.update(parameters)
        return pending[0], tree_map(mx.add, pending[1], _in_place_of(parameters, grads))


def _in_place_of(tree: dict, arrays: Sequence[mx.array]) -> dict:
    """Return a tree with other arrays, in their order."""
    remaining = iter(arrays)
    return tree_map(lambda _: next(remaining), tree)
