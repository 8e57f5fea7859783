"""The server's life: from its first connection to a signal, and the end of its requests."""

import asyncio
import math
import socket
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.applications import Starlette

from .. import signals
from .http import HEADER_BYTES, BoundedHeaders

if TYPE_CHECKING:
    from .train.service import TrainingService
    from .worker import Worker


def config_of(app: Starlette, **options: Any) -> uvicorn.Config:
    """Return how an application is served, with the bounds of headers."""
    return uvicorn.Config(
        app,
        http=BoundedHeaders,
        h11_max_incomplete_event_size=HEADER_BYTES,
        access_log=False,
        **options,
    )


def run(
    app: Starlette,
    worker: "Worker",
    training: "TrainingService | None",
    grace: float,
    listening: socket.socket,
) -> None:
    """Serve until a signal, which is raised when the server has ended."""
    config = config_of(
        app,
        log_level="warning",
        timeout_keep_alive=30,
        timeout_graceful_shutdown=math.ceil(grace) + 1,
        server_header=False,
    )

    server = uvicorn.Server(config)
    shutdown = partial(_end, worker, training, grace, server.shutdown)
    server.shutdown = shutdown  # type: ignore[method-assign]
    run_until_signalled(server, listening)


def run_until_signalled(server: uvicorn.Server, listening: socket.socket) -> None:
    """Serve; the first signal lets the server end in order, and is raised then."""
    caught: list[int] = []

    def end(number: int, _: object = None) -> None:
        caught.append(number)
        server.should_exit = True

    server.handle_exit = end  # type: ignore[method-assign]  # of uvicorn, which knows no SIGHUP
    with signals.forwarded(end):
        server.run(sockets=[listening])

    if caught:
        raise signals.Signalled(caught[0])


async def _end(
    worker: "Worker",
    training: "TrainingService | None",
    grace: float,
    shutdown: Callable[..., Awaitable[None]],
    **options: Any,
) -> None:
    """Give requests ``grace`` seconds to end, and abort the others before connections close."""
    end = time.monotonic() + grace
    if training is not None:  # while the port is open, so that its clients can ask for results
        await training.results.end(grace)

    left = max(0.0, end - time.monotonic())
    await asyncio.gather(asyncio.to_thread(worker.close, left), shutdown(**options))
