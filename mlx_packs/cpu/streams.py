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

import mlx.core as mx

from .. import runtime
from ..ops.profile import Piece


def stream_count() -> int:
    """Return how many pieces are computed at once: two where a product leaves a core idle."""
    if runtime.COMPILES or not core_is_idle():
        return 1
    return 2


def core_is_idle() -> bool:
    # several threads of a BLAS take the cores themselves, and its products then queue for them
    blas = runtime.BLAS
    return (blas.threads == 1 or blas.name == "reference") and len(os.sched_getaffinity(0)) > 1


@cache
def second_stream() -> mx.ThreadLocalStream:
    """Return the stream beside the current one, of each thread its own."""
    return mx.new_thread_local_stream(mx.cpu)


def rounds(
    pieces: Iterable[Piece], count: int
) -> Iterator[list[tuple[AbstractContextManager, Piece]]]:
    """Yield pieces with their streams, ``count`` at a time; the first stream is the current one."""
    group: list[tuple[AbstractContextManager, Piece]] = []
    for piece in pieces:
        stream = mx.stream(second_stream()) if group else nullcontext()
        group.append((stream, piece))
        if len(group) == count:
            yield group
            group = []

    if group:
        yield group
