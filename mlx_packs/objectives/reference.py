"""The model at the start of a run or a phase, and the log-probabilities of preferences by it.

No second copy is kept: the parameters saved at the phase start are swapped in for the reference
pass, or disabled if the phase started from the base without adapters. A row's log-probability is
computed once, with the first batch of the phase that has it, also in a run that is resumed later:
both have the same numbers.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.nn as nn

from ..adapters.trainable import Trainable, compiled
from ..data.dataset import Batch, Dataset, Layout
from ..distributed.group import group
from ..errors import PackError
from ..runtime import mx
from ..tensors import read_tensors, save_tensors
from .objective import Inputs, arrays_of


class PhaseReference:
    """The model at the start of a run or phase; ``bare`` if that is the base without adapters.

    ``file`` keeps the parameters of the phase start, for a resumed run. Until a phase has begun,
    its start is the ``run``'s.
    """

    def __init__(
        self,
        trainable: Trainable,
        file: Path,
        bare: bool = False,
        run: "PhaseReference | None" = None,
    ) -> None:
        self._trainable = trainable
        self._file = file
        self._bare = bare
        self._earlier = run.active if run else trainable.disabled
        self._parameters: dict[str, mx.array] | None = None

    def begin(self, fresh: bool) -> None:
        """As `take`, and keep a ``fresh`` start in the file, for a resumed run."""
        self.take(fresh)
        if fresh:
            self.save()

    def save(self) -> None:
        """Write the parameters of the start to the file."""
        if self._parameters is not None:
            save_tensors(self._file, self._parameters)

    def take(self, fresh: bool) -> None:
        """Take the model as it is, if it is ``fresh``, or as it began the phase."""
        file = self._file
        if self._bare:
            return

        if fresh:
            self._parameters = self._trainable.tensors()
        elif file.is_file():
            self._parameters = read_tensors(file)
        else:
            raise PackError(
                f"--resume: {file} is missing, which has the reference of the run. Train again "
                "with --overwrite.",
                "not-found",
                "resume",
            )

    @contextmanager
    def active(self) -> Iterator[None]:
        """Return a context in which the model computes what it did at the start."""
        if self._parameters is None:
            with self._earlier():
                yield
            return

        trained = self._trainable.tensors()
        self._trainable.load(self._parameters, "reference")
        try:
            yield
        finally:
            self._trainable.load(trained, "trained")


Sums = Callable[[Inputs, Layout], mx.array]  # to log-probabilities [slots, 2]


class Reference:
    """Log-probabilities of completions by the model as a phase began.

    ``sums`` gives, of the model as it is, the log-probability of both completions of each row;
    ``training`` has the training batches of the phase.
    """

    def __init__(
        self,
        model: nn.Module,
        initial: PhaseReference,
        sums: Sums,
        training: Dataset,
    ) -> None:
        self._model = model
        self._initial = initial
        self._first = FirstBatches(training)
        self._known: dict[tuple, mx.array] = {}  # by the rows of a held-out batch, [slots, 2]
        self._places: dict[int, tuple[mx.array, int]] = {}  # of training rows
        self._forward = compiled(model, sums)

    def begin(self, fresh: bool) -> None:
        """Take the model that began the phase; the argument is as in `PhaseReference.begin`."""
        self._known.clear()
        self._places.clear()
        self._initial.begin(fresh)

    def of(self, batch: Batch) -> mx.array:
        """Return the log-probabilities of a batch's completions, [slots, 2] float32."""
        if batch.source is not self._first.data.examples:
            return self._held_out(batch)
        self._learn(batch)

        places = [self._places[row] for row in _rows(batch)]
        slots = len(batch.inputs["labels"])

        values = places[0][0]
        numbers = [number for _, number in places]
        is_whole = all(each is values for each, _ in places) and len(values) == slots
        if is_whole and numbers == list(range(len(places))):
            return values

        parts = [values[number] for values, number in places]
        return mx.stack([*parts, *[mx.zeros((2,))] * (slots - len(parts))])

    def _learn(self, batch: Batch) -> None:
        """Compute the training rows that are not known; ranks share the work."""
        ranks = group()
        for row in _rows(batch):
            if row in self._places:
                continue
            first = self._first.of(row)
            if batch.examples == first.examples:
                first = batch

            shares = [first]
            if not ranks.is_alone:
                shares = self._first.data.collate.split(first, ranks.size)
            values = ranks.joined(self._computed(shares[ranks.rank]))
            for number, share in enumerate(shares):
                start = number * len(share.inputs["labels"])
                for i, each in enumerate(_rows(share)):
                    self._places.setdefault(each, (values, start + i))

    def _held_out(self, batch: Batch) -> mx.array:
        key = id(batch.source), batch.examples
        if key not in self._known:
            self._known[key] = self._computed(batch)
        return self._known[key]

    def _computed(self, batch: Batch) -> mx.array:
        inputs = arrays_of(batch)
        inputs.pop("reference", None)

        training = self._model.training
        self._model.eval()
        with self._initial.active():
            values = mx.stop_gradient(self._forward(inputs, batch.layout))
        self._model.train(training)

        mx.async_eval(values)
        return values


class FirstBatches:
    """The batch in which each training row first occurs, batches as far as they are asked for."""

    def __init__(self, data: Dataset) -> None:
        self.data = data
        self._orders = data.sampler.batches()
        self._next = 0
        self._numbers: dict[int, int] = {}

    def of(self, row: int) -> Batch:
        """Return the first batch that has a row, which has one."""
        while row not in self._numbers:
            for example in next(self._orders)[::2]:
                self._numbers.setdefault(int(example) // 2, self._next)
            self._next += 1

        return next(self.data.batches(self._numbers[row]))


def _rows(batch: Batch) -> list[int]:
    return [i // 2 for i in batch.examples[::2]]
