"""The model at the start of a phase: the reference of tasks that keep close to it.

No second copy is kept: the parameters saved at the phase start are swapped in for the reference
pass, or disabled if the phase started from the base without adapters.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..adapters.trainable import Trainable
from ..errors import PackError
from ..runtime import mx
from ..tensors import read_tensors, save_tensors


class PhaseStart:
    """The model at the start of a phase; ``bare`` if that is the base without adapters.

    ``file`` keeps the parameters of the phase start, for a resumed run.
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
