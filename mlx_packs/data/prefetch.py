"""Batches that are made while the one before them is trained on."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Batch = TypeVar("Batch")


def prefetched(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Yield the same batches; an error of one is raised in its place."""
    with ThreadPoolExecutor(1, "batches") as thread:
        ahead = thread.submit(next, batches, None)
        while (batch := ahead.result()) is not None:
            ahead = thread.submit(next, batches, None)
            yield batch
