"""The models in training: which are loaded, and what their clients have them do.

Requests of one model are computed in the order of their arrival. A request is as many forward
passes as its rows need. Those of several models take turns, since each passes the queue of the
thread that computes, which does other work between two.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
from starlette.concurrency import run_in_threadpool

from ...errors import PackError
from ...packs.pack import Pack
from ..generation import Generator
from .batches import Datum, RowLimits, checked_row, split_passes
from .losses import Loss, find_loss
from .passes import Grads, PassResult, TrainedModel
from .protocol import AdamBody, LoraConfigBody
from .states import Kind, Saved, States, uri_of
from .trainer import Trainer, added
from .wire import ForwardRequest, forward_output

T = TypeVar("T")
MOST_MODELS = 8


@dataclass(eq=False)
class Model:
    """A model of a session; its requests wait for its lock, and the first that came goes first."""

    id: str
    session_id: str
    trained: TrainedModel
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Models:
    """The models of all sessions, over the base of a generator, whose thread computes.

    Attributes:
        passes: forward passes so far.
        waiting: requests of forward passes that are not computed yet.
    """

    def __init__(self, generator: Generator, states: States) -> None:
        self._generator = generator
        self._states = states
        self._trainer = Trainer(generator.registry.slots)
        self.passes = 0
        self.waiting = 0
        self._models: dict[str, Model] = {}
        self._making = 0  # models that have a place and are not made yet

    @property
    def all(self) -> list[Model]:
        return list(self._models.values())

    @property
    def is_full(self) -> bool:
        return len(self._models) + self._making >= MOST_MODELS

    def find(self, model_id: str) -> Model:
        model = self._models.get(model_id)
        if model is None:
            raise PackError(
                f"model_id '{model_id:.80}': is not loaded. It was unloaded, or the server was "
                "started again; make a new one from a saved state.",
                "not-found",
                "model_id",
            )
        return model

    async def create(self, model_id: str, session_id: str, config: LoraConfigBody) -> None:
        await self._add(model_id, session_id, partial(self._trainer.create, config))

    async def _add(self, model_id: str, session_id: str, make: Callable[[], TrainedModel]) -> None:
        if self.is_full:
            raise PackError(
                f"{MOST_MODELS} models are in training, which is the most. Unload one, or close "
                "its client.",
                "conflict",
            )

        self._making += 1
        try:
            trained = await self._generator.result_of(make)
        finally:
            self._making -= 1
        self._models[model_id] = Model(model_id, session_id, trained)

    async def unload(self, model: Model) -> None:
        """Forget a model, when its earlier requests are computed."""
        async with model.lock:
            self._models.pop(model.id, None)

    async def forward(self, model: Model, request: ForwardRequest) -> bytes:
        """Compute a loss of some datums, with its gradient unless the request is `forward_only`.

        The gradient is added to those that wait, of all datums or of none.
        """
        loss = find_loss(request.loss)
        limits = RowLimits(self._generator.limits.context, self._generator.base.vocab_size)

        def checked() -> list[Datum]:
            data = enumerate(request.data)
            return [checked_row(i, each, loss, limits) for i, each in data]

        if not request.data:
            raise PackError("data: has no datum.", flag="data")

        async with model.lock:
            self._check_loaded(model)
            rows = await run_in_threadpool(checked)
            result = await self._forward(model.trained, rows, loss, not request.forward_only)
            if result.grads is not None:
                await self._generator.result_of(
                    partial(self._trainer.add, model.trained, result.grads)
                )

        return forward_output(result.logprobs, {"loss:sum": result.loss})

    async def _forward(
        self, model: TrainedModel, rows: Sequence[Datum], loss: Loss, backward: bool
    ) -> PassResult:
        """Compute as many passes as the rows need, and return their sum."""
        total = 0.0
        logprobs: dict[int, np.ndarray] = {}
        grads: Grads | None = None

        def compute(numbers: Sequence[int]) -> None:
            nonlocal total, grads
            result = self._trainer.run(model, [rows[i] for i in numbers], loss, backward)
            total += result.loss
            logprobs.update(zip(numbers, result.logprobs, strict=True))
            if result.grads is not None:
                grads = added(grads, result.grads)

        self.waiting += 1
        try:
            for numbers in split_passes(rows, model.most_inputs):
                await self._generator.result_of(partial(compute, numbers))
                self.passes += 1
        finally:
            self.waiting -= 1
        return PassResult(total, [logprobs[i] for i in range(len(rows))], grads)

    async def update(self, model: Model, params: AdamBody) -> float:
        async with model.lock:
            self._check_loaded(model)
            return await self._generator.result_of(
                partial(self._trainer.update, model.trained, params)
            )

    async def pack(self, model: Model) -> Pack:
        """Return a copy of a model, whose lock the caller holds, as a pack."""
        self._check_loaded(model)
        return await self._generator.result_of(partial(self._trainer.pack, model.trained))

    async def save(
        self, model: Model, kind: Kind, name: str, facts: Mapping[str, Any], overwrite: bool = False
    ) -> Saved:
        """Save a model; one of ``weights`` has the state of its optimizer."""
        uri = uri_of(model.id, kind, name)

        def write() -> Saved:
            optimizer = self._trainer.state_of(model.trained) if kind == "weights" else None
            pack = self._trainer.pack(model.trained)
            return self._states.save(uri, pack, facts, optimizer, overwrite)

        async with model.lock:
            self._check_loaded(model)
            return await self._generator.result_of(write)

    async def load(self, model_id: str, session_id: str, saved: Saved, optimizer: bool) -> None:
        """Make a model of a saved one."""

        def open_saved() -> TrainedModel:
            state = self._states.optimizer_of(saved) if optimizer else None
            return self._trainer.of_pack(Pack.open(saved.folder), state)

        await self._add(model_id, session_id, open_saved)

    def _check_loaded(self, model: Model) -> None:
        self.find(model.id)
