"""The model as it was when a phase began: the reference of tasks that keep near to it.

It is no second model: the trainable parameters of that moment are put back for a forward pass, or
disabled where the phase began with the base alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..adapters.trainable import Trainable
from ..errors import PackError
from ..runtime import mx
from ..tensors import read_tensors, save_tensors


class PhaseStart:
    """The model as a phase began; ``bare`` if it began with the base alone.

    ``file`` keeps the parameters that the phase began with, for a resumed run.
    """

    def __init__(self, trainable: Trainable, file: Path, bare: bool) -> None:
        self._trainable = trainable
        self._file = file
        self._bare = bare
        self._parameters: dict[str, mx.array] | None = None

    def begin(self, fresh: bool) -> None:
        """Take the model as it is, if it is ``fresh``, or that which began the phase.

        Raises a PackError if a resumed run lacks the file of its parameters.
        """
        file = self._file
        if self._bare:
            return

        if fresh:
            self._parameters = self._trainable.tensors()
            save_tensors(file, self._parameters)
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
