"""Calls that wait for a forward pass; those of several models that wait at once share one.

A pass has rows of every call that fits, in turn, so that nobody waits for a long call of another
client. The thread that computes takes one pass at a time, and does other work between two.
"""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from weakref import WeakSet

import numpy as np

from ..worker import Worker
from .batches import SMALL, Room, Row, batch_of, padded_width
from .losses import Loss
from .passes import Grads, Part, Pass, TrainedModel
from .trainer import Trainer, added

log = logging.getLogger("mlx_packs.serving")
_PATIENCE = 1 / 3  # of the time of a pass, that the next one waits for models of this one
_MOST_PATIENCE = 0.5  # seconds
_AGAIN = 16  # passes after which models that came too late are waited for again


@dataclass(eq=False)
class Call:
    """A forward pass of some rows of a model, or one with its gradient, in as many parts as needed.

    Attributes:
        model: has one call at a time here.
        total: the loss so far; ``logprobs`` are by the number of the row, ``grads`` the sum.
    """

    model: TrainedModel
    rows: Sequence[Row]
    loss: Loss
    backward: bool
    total: float = 0.0
    logprobs: dict[int, np.ndarray] = field(default_factory=dict)
    grads: Grads | None = None

    def __post_init__(self) -> None:
        longest_first = sorted(range(len(self.rows)), key=lambda i: -self.rows[i].size)
        self.left = deque(longest_first)
        self.turn = 0
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def take(self, part: Part, done: Pass) -> None:
        """Add what a pass made of some of the rows."""
        self.total += done.loss
        self.logprobs |= zip(part.batch.numbers, done.logprobs, strict=True)
        if self.grads is None:
            self.grads = done.grads
        elif done.grads is not None:
            self.grads = added(self.grads, done.grads)


class CallQueue:
    """The calls that wait, of all models.

    Attributes:
        passes: so far, by the number of models that they had.
    """

    def __init__(self, worker: Worker, trainer: Trainer) -> None:
        self.passes: Counter[int] = Counter()
        self._worker = worker
        self._trainer = trainer
        self._calls: list[Call] = []
        self._turns = count(1)
        self._arrived = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

        # of the pass before: its models, and for how many seconds the next one waits for them
        self._before: WeakSet[TrainedModel] = WeakSet()
        self._patience = 0.0
        self._late: WeakSet[TrainedModel] = WeakSet()

    @property
    def waiting(self) -> int:
        """Calls that are not over."""
        return len(self._calls)

    async def compute(self, call: Call) -> None:
        """Compute a call, with others that wait meanwhile; raise what is wrong with this one."""
        call.turn = next(self._turns)
        self._calls.append(call)
        self._arrived.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

        try:
            await call.over
        finally:
            if call in self._calls:  # its client has ended it
                self._calls.remove(call)

    async def _run(self) -> None:
        """Compute passes until nothing waits."""
        while self._calls:
            await self._wait_for_others()
            try:
                ended = await asyncio.wrap_future(self._worker.call(self._step))
            except Exception as error:
                ended = dict.fromkeys(self._calls, error)

            for call, error in ended.items():
                if call.over.done():
                    continue
                self._calls.remove(call)
                if error is None:
                    call.over.set_result(None)
                else:
                    call.over.set_exception(error)

    async def _wait_for_others(self) -> None:
        """Wait for models of the pass before, which come back at once if their loops are simple.

        A third of its time is about what two clients with short rows save by the next one. Those
        that come later are not waited for any more, until models share a pass or some are over.
        """
        end = time.monotonic() + self._patience
        while missing := self._missing():
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), end - time.monotonic())
            except asyncio.TimeoutError:
                self._late |= missing

    def _missing(self) -> set[TrainedModel]:
        """Return models of the pass before that may come, if so few inputs wait that it pays."""
        inputs = sum(call.rows[i].size for call in self._calls for i in call.left)
        if inputs > SMALL:
            return set()

        waiting = {call.model for call in self._calls}
        return set(self._before) - waiting - set(self._late)

    def _step(self) -> dict[Call, Exception | None]:
        """Compute one pass; return the calls that are over, with what is wrong with each.

        The thread that computes calls this, so that the pass has all that waits by then.
        """
        taken = self._next_rows()
        if not taken:
            return {}

        width = padded_width([call.rows[i] for call, numbers in taken.items() for i in numbers])
        parts = [
            Part(call.model, batch_of(call.rows, numbers, width), call.loss)
            for call, numbers in taken.items()
        ]
        began = time.monotonic()
        results = self._computed(parts, next(iter(taken)).backward)

        self._patience = min(_PATIENCE * (time.monotonic() - began), _MOST_PATIENCE)
        self._before = WeakSet(call.model for call in taken)
        if len(taken) > 1 or not self.passes.total() % _AGAIN:
            self._late.clear()

        over: dict[Call, Exception | None] = {}
        for call, part, result in zip(taken, parts, results, strict=True):
            call.turn = next(self._turns)
            if isinstance(result, Exception):
                over[call] = result
                continue

            try:
                call.take(part, result)
            except Exception as error:  # no memory for its gradient
                over[call] = error
            else:
                if not call.left:
                    over[call] = None
        return over

    def _next_rows(self) -> dict[Call, list[int]]:
        """Take the rows of the next pass: one of each call in turn, while they fit."""
        calls = self._calls_of_next()
        if not calls:
            return {}

        room = Room(min(call.model.most_inputs for call in calls))
        taken: dict[Call, list[int]] = {}
        while calls:
            calls = [call for call in calls if call.left and room.takes(call.rows[call.left[0]])]
            for call in calls:
                taken.setdefault(call, []).append(call.left.popleft())
        return taken

    def _calls_of_next(self) -> list[Call]:
        """Return the call that has waited longest, and those that can share its pass."""
        waiting = sorted(list(self._calls), key=lambda call: call.turn)
        calls: list[Call] = []
        for call in waiting:
            if not call.left or call.over.done():
                continue
            models = [other.model for other in calls]
            if not calls:
                calls.append(call)
            elif call.backward == calls[0].backward and self._trainer.can_share(models, call.model):
                calls.append(call)
        return calls

    def _computed(self, parts: Sequence[Part], backward: bool) -> Sequence[Pass | Exception]:
        """Compute a pass; if it fails, each part alone, so that one does not fail the others."""
        try:
            results = self._trainer.run(parts, backward)
        except Exception as error:
            if len(parts) == 1:
                return [error]
            log.warning("A pass of %d models failed; each is computed alone.", len(parts))
            return [self._computed([part], backward)[0] for part in parts]

        self.passes[len(parts)] += 1
        return results
