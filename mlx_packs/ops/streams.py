"""Parallel CPU streams: pieces of one large operation are computed at the same time.

MLX computes the operations of a stream one by one, and the threads of a BLAS wait for each other by
spinning, so that another busy program makes both slow. Streams block instead. Pieces are assigned
in rounds, each of which waits for the one before: MLX hands out no more work while some hundred
operations of all streams together wait, and a stream far ahead would leave the others none.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TypeVar

import mlx.core as mx

from ..runtime import BLAS, COMPILES, on_cpu
from .tiling import tiling

Piece = TypeVar("Piece")


def stream_count() -> int:
    """Return how many pieces are computed at once: two on a CPU where a product leaves a core idle."""
    if not on_cpu() or COMPILES:
        return 1
    return tiling().streams or (2 if core_is_idle() else 1)


@cache
def core_is_idle() -> bool:
    """Return whether a product of the BLAS leaves a core idle."""
    # several threads of a BLAS take the cores themselves, and its products then queue for them
    return (BLAS.threads == 1 or BLAS.name == "reference") and len(os.sched_getaffinity(0)) > 1


@cache
def second_stream() -> mx.ThreadLocalStream:
    """Return the stream beside the current one, of each thread its own."""
    return mx.new_thread_local_stream(mx.cpu)


def rounds(pieces: Iterable[Piece]) -> Iterator[list[tuple[AbstractContextManager, Piece]]]:
    """Yield pieces with their streams, as many at a time as there are; the first is the current."""
    group: list[tuple[AbstractContextManager, Piece]] = []
    count = stream_count()
    for piece in pieces:
        stream = mx.stream(second_stream()) if group else nullcontext()
        group.append((stream, piece))
        if len(group) == count:
            yield group
            group = []
    if group:
        yield group
