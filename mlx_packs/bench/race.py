"""Time implementations of a training step in one process, alternating.

Everything runs inside mlx-lm's own ``train()``. It asks for its next batch, and while it waits the
other implementations take their turns, in the order A B C C B A. Losses and counted tokens of all
of them are compared first.
"""

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from ..data.dataset import Batch
from ..runtime import mx
from .implementations import Adapters, MlxLmTrainer, Ours, TokenRows

CHECKED_STEPS = 2  # the second loss has gradients and optimizer in it
TOLERANCE = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 1e-2}  # of the loss, by activations


Steps = Iterator[tuple]  # batches for mlx-lm; between them the others take their steps


class LossesDiffer(Exception):
    """The implementations do not compute the same, so their speeds cannot be compared."""


@dataclass(eq=False)
class Entry:
    """One implementation in the race, and what it has shown so far.

    Attributes:
        batch: What its steps take, made of ``rows``.
        steps: Timed ones of a turn.
        untimed: Steps before them: of an implementation that keeps MLX's cache of buffers, which a
            turn begins without.
        around: A context for its steps.
        checked: Whether its losses are compared; another entry of the same may represent it.
        step_ms: Of the timed steps, turn by turn.
        checked_ms: Of the steps that were compared.
        transient_bytes: The most that a step took on top of what its implementation keeps.
    """

    name: str
    implementation: MlxLmTrainer | Ours
    rows: TokenRows
    batch: Batch | tuple[mx.array, ...]
    steps: int = 1
    untimed: int = 0
    around: Callable[[], AbstractContextManager] = nullcontext
    checked: bool = True
    step_ms: list[list[float]] = field(default_factory=list)
    checked_ms: list[float] = field(default_factory=list)
    transient_bytes: int = 0

    @property
    def all_ms(self) -> list[float]:
        return [ms for turn in self.step_ms for ms in turn]

    @property
    def peak_bytes(self) -> int:
        """MLX memory that this implementation needs on its own."""
        return self.implementation.resident_bytes + self.transient_bytes

    @contextlib.contextmanager
    def memory(self) -> Iterator[None]:
        """Count what is allocated inside as this implementation's."""
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        yield
        self.transient_bytes = max(self.transient_bytes, mx.get_peak_memory() - before)


def race(
    adapters: Adapters,
    entries: list[Entry],
    turns: Iterable[int],
    tolerance: float,
) -> None:
    """Check that all entries compute the same, then time them, forth and back.

    Args:
        adapters: that all start from.
        entries: in the order of even turns; odd ones have it reversed. All that are mlx-lm's have
            the same `MlxLmTrainer`, and one of them comes first.
        turns: their numbers; they are taken one by one, after the check.
        tolerance: of a loss, as a share of mlx-lm's.

    Raises:
        LossesDiffer: before anything is timed.
    """

    def batches() -> Steps:
        expected: list[float] = []
        for entry in entries:
            if entry.checked:
                losses = yield from _check(entry, entries[0].rows, adapters)
                expected = expected or losses
                check_losses(expected, losses, entry.name, tolerance)

        for turn in turns:
            order = entries if turn % 2 == 0 else entries[::-1]
            for entry in order:
                yield from _take_turn(entry)

    with contextlib.closing(batches()) as schedule:
        entries[0].implementation.train(schedule)


def check_losses(expected: list[float], results: list[float], name: str, tolerance: float) -> None:
    """Raise LossesDiffer unless the first losses are within the tolerance of mlx-lm's."""
    if not all(abs(a - b) <= tolerance * a for a, b in zip(expected, results, strict=True)):
        raise LossesDiffer(
            f"losses of mlx-lm {expected} and of {name} {results} differ by "
            f"more than {tolerance:g} of mlx-lm's"
        )


def _check(
    entry: Entry, rows: TokenRows, adapters: Adapters
) -> Generator[tuple, None, list[float]]:
    """Take the first steps of an entry on mlx-lm's rows, and return their losses."""
    batch = entry.batch
    peer = None
    before = 0
    if isinstance(entry.implementation, MlxLmTrainer):
        peer = entry.implementation
        peer.reset(adapters)
        before = peer.trained_tokens
    elif rows is not entry.rows:
        batch = rows.for_ours()

    losses = []
    with entry.around():
        for _ in range(CHECKED_STEPS):
            ms, loss = yield from _step(entry, batch)
            entry.checked_ms.append(ms)
            losses.append(loss)

    if peer and (counted := peer.trained_tokens - before) != rows.targets * CHECKED_STEPS:
        raise LossesDiffer(
            f"mlx-lm counts {counted} targets in {CHECKED_STEPS} steps, ours {rows.targets} in each"
        )
    return losses


def _take_turn(entry: Entry) -> Steps:
    """Time some steps of an entry, which starts as it would find things alone."""
    mx.clear_cache()
    turn = []
    with entry.around():
        for _ in range(entry.untimed):
            yield from _step(entry, entry.batch)
        if isinstance(entry.implementation, Ours):
            with entry.memory():
                turn = entry.implementation.steps(entry.batch, entry.steps)
        else:
            for _ in range(entry.steps):
                with entry.memory():
                    ms, _ = yield from _step(entry, entry.batch)
                turn.append(ms)

    entry.step_ms.append(turn)


def _step(
    entry: Entry, batch: Batch | tuple[mx.array, ...]
) -> Generator[tuple, None, tuple[float, float]]:
    """Take a step, and return its milliseconds and loss; mlx-lm trains on the given batch."""
    if isinstance(entry.implementation, MlxLmTrainer):
        yield batch
        return entry.implementation.step_ms, entry.implementation.loss
    return entry.implementation.step(batch)
