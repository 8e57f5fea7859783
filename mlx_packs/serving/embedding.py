"""Embeddings of texts and scores of documents, those of different packs in one batch."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from ..bases.model import BaseModel
from ..bases.tokenizer import padded
from ..errors import PackError
from ..late import load
from ..runtime import mx
from .registry import Entry, PackRegistry
from .slots import PackSlots
from .worker import Worker


@dataclass(eq=False)
class _Texts:
    """The texts of one request; ``vectors`` are those that are computed."""

    entry: Entry
    rows: list[np.ndarray]
    future: "Future[np.ndarray]"
    vectors: list[np.ndarray]


class Embedder(Worker):
    """Computes embeddings, a batch of texts at a time.

    Args:
        base: without a pack.
        batch_size: texts of one batch.
        waiting: texts that wait at most; requests with more are rejected.

    Attributes:
        registry: the packs; only `call` may touch it.
        prefilled: tokens so far.
    """

    route = "/v1/embeddings"

    def __init__(self, base: BaseModel, batch_size: int, waiting: int) -> None:
        super().__init__()
        self._compute = self.compute_of(base)
        self.base = base
        self._batch_size = batch_size
        self._limit = waiting
        self.registry = PackRegistry(PackSlots(base))
        self.generated = self.prefilled = self.reused = self.cached_bytes = 0
        self._waiting: deque[_Texts] = deque()

    def compute_of(self, base: BaseModel) -> Callable[[mx.array, mx.array], mx.array]:
        """Return what computes tokens [B, T] with lengths [B] to results [B, ...]."""
        return base.embedder.vectors

    @property
    def counts(self) -> tuple[int, int]:
        return min(1, len(self._waiting)), max(0, len(self._waiting) - 1)

    def submit(self, model: str, rows: Sequence[np.ndarray]) -> "Future[np.ndarray]":
        """Return the future vectors [N, D] of tokenized texts; cancelling it ends the request."""
        future: Future[np.ndarray] = Future()
        self.post(lambda: self._enqueue(model, list(rows), future))
        return future

    def _enqueue(self, model: str, rows: list[np.ndarray], future: "Future[np.ndarray]") -> None:
        waiting = sum(len(texts.rows) for texts in self._waiting)
        try:
            if self._closing is not None:
                raise PackError("The server is shutting down.", "interrupted")
            if waiting and waiting + len(rows) > self._limit:
                raise PackError(f"The queue is full: {waiting} texts wait.", "busy")
            entry = self.registry.lease(model)
        except Exception as error:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
            return
        self._waiting.append(_Texts(entry, rows, future, []))

    def is_busy(self) -> bool:
        return bool(self._waiting)

    def step(self) -> None:
        """Compute a batch of the texts that have waited longest."""
        self._forget_cancelled()
        if not self._waiting:
            return

        batch = []
        for texts in self._waiting:
            missing = texts.rows[len(texts.vectors) :]
            batch += [(texts, row) for row in missing[: self._batch_size - len(batch)]]

        rows = [row for _, row in batch]
        self.registry.slots.selection.set([texts.entry.slot for texts, _ in batch])
        lengths = mx.array([len(row) for row in rows])
        vectors = np.array(self._compute(mx.array(padded(rows)), lengths))
        self.prefilled += sum(map(len, rows))

        for (texts, _), vector in zip(batch, vectors, strict=True):
            texts.vectors.append(vector)

        while self._waiting and len(self._waiting[0].vectors) == len(self._waiting[0].rows):
            texts = self._waiting.popleft()
            self.registry.release(texts.entry)
            if texts.future.set_running_or_notify_cancel():
                texts.future.set_result(np.stack(texts.vectors))

    def _forget_cancelled(self) -> None:
        for texts in [texts for texts in self._waiting if texts.future.cancelled()]:
            self._waiting.remove(texts)
            self.registry.release(texts.entry)

    def on_failure(self, error: Exception) -> None:
        while self._waiting:
            texts = self._waiting.popleft()
            self.registry.release(texts.entry)
            if texts.future.set_running_or_notify_cancel():
                texts.future.set_exception(error)

    def on_end(self, reason: PackError) -> None:
        self.on_failure(reason)
        self.registry.close()


class Reranker(Embedder):
    """Computes scores of documents with their queries, [N] in place of vectors."""

    route = "/v1/rerank"

    def compute_of(self, base: BaseModel) -> Callable[[mx.array, mx.array], mx.array]:
        return load("objectives.rerank:YesOrNo")(base.model, base.tokenizer)
