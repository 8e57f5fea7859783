"""The reference of a run on preferences: log-probabilities by the model as the phase began.

Each is computed once, in the first batch that has it, so that a resumed run computes the same
numbers.
"""

from collections.abc import Callable

import mlx.nn as nn

from ..adapters.trainable import trainable_modules
from ..data.preference_batches import PreferenceBatch, shared_rows
from ..distributed.group import group
from ..runtime import mx
from .causal_lm import Arrays, as_arrays
from .phase_start import PhaseStart

Sums = Callable[[int, Arrays], mx.array]  # rows and arrays to log-probabilities [rows, 2]


class Reference:
    """Log-probabilities of completions by the model as a phase began.

    Args:
        model: the model.
        start: the model as the phase began.
        sums: of the model as it is, the log-probability of both completions of each row.
        first: of the number of a training row, the batch of the phase in which it first occurs.
    """

    def __init__(
        self,
        model: nn.Module,
        start: PhaseStart,
        sums: Sums,
        first: Callable[[int, int], PreferenceBatch],
    ) -> None:
        self._model, self._start, self._first = model, start, first
        self._phase = 0  # batches of the run before it
        self._known: dict[tuple, mx.array] = {}  # by split and rows of a batch, [slots, 2]
        self._places: dict[int, tuple[mx.array, int]] = {}  # of training rows

        def forward(slots: mx.array, *arrays: mx.array) -> mx.array:
            return sums(len(slots), arrays)

        state = [module.state for module in trainable_modules(model)]
        self._forward = mx.compile(forward, inputs=state)

    def begin(self, start: int, fresh: bool) -> None:
        """Take the model that began a phase; arguments are those of `PhaseStart.begin`."""
        self._known.clear()
        self._places.clear()
        self._phase = start
        self._start.begin(start, fresh)

    def of(self, batch: PreferenceBatch) -> mx.array:
        """Return the log-probabilities of a batch's completions, [slots, 2] float32."""
        if batch.split != "train":
            return self._computed(batch)
        self.learn(batch)
        arrays = {id(array): array for array, _ in (self._places[row] for row in batch.rows)}
        (one,) = arrays.values() if len(arrays) == 1 else (None,)
        numbers = [self._places[row][1] for row in batch.rows]
        if (
            one is not None
            and numbers == list(range(len(batch.rows)))
            and len(one) == len(batch.labels)
        ):
            return one
        parts = [self._places[row][0][self._places[row][1]] for row in batch.rows]
        padding = [mx.zeros((2,))] * (len(batch.labels) - len(parts))
        return mx.stack([*parts, *padding])

    def learn(self, batch: PreferenceBatch) -> None:
        """Compute the log-probabilities of training rows that are not known; ranks share the work."""
        ranks = group()
        for row in batch.rows:
            if row in self._places:
                continue
            first = self._first(self._phase, row)
            first = batch if batch.rows == first.rows else first
            shares = [first] if ranks.is_alone else shared_rows(first, ranks.size)
            values = ranks.joined(self._computed(shares[ranks.rank], keep=False))
            for number, share in enumerate(shares):
                start = number * len(share.labels)
                for i, each in enumerate(share.rows):
                    self._places.setdefault(each, (values, start + i))

    def _computed(self, batch: PreferenceBatch, keep: bool = True) -> mx.array:
        key = batch.split, batch.rows
        if key in self._known:
            return self._known[key]
        tokens, positions, targets, _, *segments = as_arrays(batch.tokens)
        arrays = tokens, positions, targets, mx.array(batch.tokens.owners), *segments
        slots = mx.zeros((len(batch.labels),))
        training = self._model.training
        self._model.eval()
        with self._start.active():
            values = mx.stop_gradient(self._forward(slots, *arrays))
        self._model.train(training)
        mx.async_eval(values)
        if keep:
            self._known[key] = values
        return values
