"""The reference of a run on preferences: the model as it was when the phase began.

It is no second model: the trainable parameters are put back for a forward pass, or disabled where
the phase began with the base alone. Each log-probability is computed once, in the first batch that
has it, so that a resumed run computes the same numbers.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.nn as nn

from ..adapters.method import Trainable, trainable_modules
from ..data.preference_batches import PreferenceBatch
from ..errors import PackError
from ..files import save_tensors
from ..reading import read_tensors
from ..runtime import mx
from .causal_lm import Arrays, as_arrays

Sums = Callable[[int, Arrays], mx.array]  # rows and arrays to log-probabilities [rows, 2]


class Reference:
    """Log-probabilities of completions by the model as a phase began.

    Args:
        trainable: what the model has learned, and how to put it aside.
        sums: of the model as it is, the log-probability of both completions of each row.
        first: of the number of a training row, the batch of the phase in which it first occurs.
        file: of the number of batches before a phase, the file for the parameters it begins with.
        bare: whether the run begins with the base alone.
    """

    def __init__(
        self,
        trainable: Trainable,
        sums: Sums,
        first: Callable[[int, int], PreferenceBatch],
        file: Callable[[int], Path],
        bare: bool,
    ) -> None:
        self._trainable, self._first, self._file, self._bare = trainable, first, file, bare
        self._start, self._parameters = 0, None
        self._known: dict[tuple, mx.array] = {}  # by split and rows of a batch, [slots, 2]
        self._places: dict[int, tuple[mx.array, int]] = {}  # of training rows
        model: nn.Module = trainable.model

        def forward(slots: mx.array, *arrays: mx.array) -> mx.array:
            return sums(len(slots), arrays)

        state = [module.state for module in trainable_modules(model)]
        self._forward = mx.compile(forward, inputs=state)

    def begin(self, start: int, fresh: bool) -> None:
        """Take the model as it is for the reference, or that which began the phase.

        Args:
            start: number of batches of the run before the phase.
            fresh: whether the model is as the phase begins with it.
        """
        self._known.clear()
        self._places.clear()
        self._start, self._parameters = start, None
        if self._bare and start == 0:
            return
        file = self._file(start)
        if fresh:
            self._parameters = self._trainable.tensors()
            save_tensors(file, self._parameters)
        elif file.is_file():
            self._parameters = read_tensors(file)
        else:
            raise PackError(
                f"--resume: {file} is missing, which has the reference of the run. Train again with "
                "--overwrite.",
                "not-found",
                "resume",
            )

    def of(self, batch: PreferenceBatch) -> mx.array:
        """Return the log-probabilities of a batch's completions, [slots, 2] float32."""
        if batch.split != "train":
            return self._computed(batch)
        missing = [row for row in batch.rows if row not in self._places]
        for row in missing:
            if row not in self._places:
                self._learn(batch, row)
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

    def _learn(self, batch: PreferenceBatch, row: int) -> None:
        """Compute the log-probabilities of the batch in which a training row first occurs."""
        first = self._first(self._start, row)
        first = batch if batch.rows == first.rows else first
        values = self._computed(first, keep=False)
        for number, each in enumerate(first.rows):
            self._places.setdefault(each, (values, number))

    def _computed(self, batch: PreferenceBatch, keep: bool = True) -> mx.array:
        key = batch.split, batch.rows
        if key in self._known:
            return self._known[key]
        tokens, positions, targets, _, *segments = as_arrays(batch.tokens)
        arrays = tokens, positions, targets, mx.array(batch.tokens.owners), *segments
        slots = mx.zeros((len(batch.labels),))
        model = self._trainable.model
        training = model.training
        model.eval()
        with self._as_it_began():
            values = mx.stop_gradient(self._forward(slots, *arrays))
        model.train(training)
        mx.async_eval(values)
        if keep:
            self._known[key] = values
        return values

    @contextmanager
    def _as_it_began(self) -> Iterator[None]:
        """Return a context in which the model is the reference."""
        if self._parameters is None:
            with self._trainable.disabled():
                yield
            return
        trained = self._trainable.tensors()
        self._trainable.load(self._parameters, "reference")
        try:
            yield
        finally:
            self._trainable.load(trained, "trained")
