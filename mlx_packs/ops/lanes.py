"""Streams that compute at once on a CPU: pieces of one large operation are dealt to them.

MLX computes the operations of a stream one by one, and the threads of a BLAS wait for each other by
spinning, so that another busy program makes both slow. Streams wait asleep. Pieces are dealt in
rounds, each of which waits for the one before: MLX hands out no more work while some hundred
operations of all streams together wait, and a stream far ahead would leave the others none.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TypeVar

import mlx.core as mx

from ..runtime import BLAS, COMPILES, on_cpu

Piece = TypeVar("Piece")


def lanes() -> int:
    """How many pieces are computed at once: two on a CPU where one product leaves a core idle."""
    return 2 if on_cpu() and not COMPILES and _core_is_idle() else 1


@cache
def _core_is_idle() -> bool:
    # several threads of a BLAS take the cores themselves, and its products then queue for them
    return (BLAS.threads == 1 or BLAS.name == "reference") and len(os.sched_getaffinity(0)) > 1


def lane(number: int) -> AbstractContextManager:
    """What is made inside is computed by this lane; 0 is the stream at work."""
    return mx.stream(_second_stream()) if number else nullcontext()


@cache
def _second_stream() -> mx.ThreadLocalStream:
    return mx.new_thread_local_stream(mx.cpu)


def rounds(pieces: Iterable[Piece]) -> Iterator[list[tuple[AbstractContextManager, Piece]]]:
    """Pieces in order, as many as there are lanes at a time, each with the lane that makes it."""
    group: list[tuple[AbstractContextManager, Piece]] = []
    for piece in pieces:
        group.append((lane(len(group)), piece))
        if len(group) == lanes():
            yield group
            group = []
    if group:
        yield group
