"""Embeddings of texts and scores of documents, with different packs in one batch."""

import itertools
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..bases.model import BaseModel
from ..bases.tokenizer import padded
from ..errors import PackError
from ..nn.served_lora import BASE
from ..objectives.reader import ranking_reader
from ..runtime import mx
from .registry import PackRegistry, Served
from .slots import PackSlots
from .worker import Worker

_TOKENS = 1 << 13  # of a batch, between which clients that have left are noticed
_LEAST_TOKENS = 1 << 8
_STEP_SECONDS = 1.0  # that a batch should take


@dataclass(eq=False)
class _WaitingTexts:
    """The texts of one request; ``vectors`` are those that are computed."""

    entry: Served
    rows: list[np.ndarray]
    future: "Future[np.ndarray]"
    vectors: list[np.ndarray]


class EmbeddingWorker(Worker):
    """Computes embeddings, a batch of texts at a time.

    Args:
        base: without a pack.
        batch_size: texts of one batch.
        waiting: maximum number of texts in the queue; requests with more are rejected.

    Attributes:
        registry: the packs; only `call` may touch it.
    """

    route = "/v1/embeddings"
    task = "embedding"

    def __init__(self, base: BaseModel, batch_size: int, waiting: int) -> None:
        super().__init__()
        self.base = base
        self._batch_size = batch_size
        self._limit = waiting
        self.registry = PackRegistry(PackSlots(base), self.task)
        self._waiting: deque[_WaitingTexts] = deque()
        self._most_tokens = 4 * _LEAST_TOKENS  # until one was timed

    def compute(self, entries: Sequence[Served], tokens: mx.array, lengths: mx.array) -> mx.array:
        """Return the results [B, ...] of tokens [B, T] with lengths [B], each by its entry."""
        return self.base.embedder.vectors(tokens, lengths)

    def lease(self, model: str) -> Served:
        return self.registry.lease(model)

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
            is_full = waiting > 0 and waiting + len(rows) > self._limit
            self.check_queue(is_full, f"{waiting} texts")
            entry = self.lease(model)
        except Exception as error:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
            return
        self._waiting.append(_WaitingTexts(entry, rows, future, []))

    def is_busy(self) -> bool:
        return bool(self._waiting)

    def step(self) -> None:
        """Compute a batch of texts, of all requests that wait in turn."""
        for texts in [texts for texts in self._waiting if texts.future.cancelled()]:
            self._waiting.remove(texts)
            self.registry.release(texts.entry)
        if not self._waiting:
            return

        missing = [
            [(texts, row) for row in texts.rows[len(texts.vectors) :][: self._batch_size]]
            for texts in self._waiting
        ]
        turns = itertools.chain.from_iterable(itertools.zip_longest(*missing))
        batch = [each for each in turns if each is not None][: self._batch_size]
        batch = batch[: rows_within([len(row) for _, row in batch], self._most_tokens)]
        rows = [row for _, row in batch]
        entries = [texts.entry for texts, _ in batch]
        self.registry.slots.selection.set([entry.slot for entry in entries])
        lengths = mx.array([len(row) for row in rows])
        began = time.monotonic()
        vectors = np.array(self.compute(entries, mx.array(padded(rows)), lengths))
        pace = len(rows) * max(map(len, rows)) / (time.monotonic() - began + 1e-9)
        self._most_tokens = max(_LEAST_TOKENS, min(_TOKENS, int(pace * _STEP_SECONDS)))

        for (texts, _), vector in zip(batch, vectors, strict=True):
            texts.vectors.append(vector)

        for texts in [t for t in self._waiting if len(t.vectors) == len(t.rows)]:
            self._waiting.remove(texts)
            self.registry.release(texts.entry)
            if texts.future.set_running_or_notify_cancel():
                texts.future.set_result(np.stack(texts.vectors))

    def on_failure(self, error: Exception) -> None:
        while self._waiting:
            texts = self._waiting.popleft()
            self.registry.release(texts.entry)
            if texts.future.set_running_or_notify_cancel():
                texts.future.set_exception(error)

    def on_end(self, reason: PackError) -> None:
        self.on_failure(reason)
        self.registry.slots.close()


def rows_within(lengths: Sequence[int], most: int) -> int:
    """Return how many rows, one at least, are a batch of ``most`` tokens with their padding."""
    widths = itertools.accumulate(lengths, max)
    tokens = [count * width for count, width in enumerate(widths, 1)]
    return max(1, sum(each <= most for each in tokens))


class Reranker(EmbeddingWorker):
    """Computes scores of documents with their queries, [N] in place of vectors.

    A pack with a head of its own is scored by it, and all others by the LM head.
    """

    route = "/v1/rerank"
    task = "rerank"

    def __init__(self, base: BaseModel, batch_size: int, waiting: int) -> None:
        super().__init__(base, batch_size, waiting)
        self._scorers: dict[int | None, Any] = {}  # by the key of an entry with a head
        self._made_with: Any = None  # the modules that they read

    def compute(self, entries: Sequence[Served], tokens: mx.array, lengths: mx.array) -> mx.array:
        scorers = [self._scorer(entry) for entry in entries]
        last = scorers[0].last(tokens, lengths)
        scores = mx.zeros(len(entries))

        for scorer in dict.fromkeys(scorers):
            is_own = mx.array([each is scorer for each in scorers])
            scores = mx.where(is_own, scorer.of_last(last), scores)

        return scores

    def lease(self, model: str) -> Served:
        entry = super().lease(model)

        try:
            self._scorer(entry)
        except PackError:
            self.registry.release(entry)
            raise
        return entry

    def _scorer(self, entry: Served) -> Any:
        """Return what scores with a pack; a PackError if the base's tokenizer has no yes and no."""
        slots = self.registry.slots
        if self._made_with is not slots.attached:
            self._scorers.clear()
        self._made_with = slots.attached

        key = entry.key if entry.head is not None else None
        if key not in self._scorers:
            slots.selection.set([BASE])  # that the model is tried with
            self._scorers[key] = ranking_reader(self.base, entry.head)
        return self._scorers[key]
