"""The compute thread: it runs functions that other threads submit between two decoding steps."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TypeVar

from ..errors import PackError

T = TypeVar("T")
log = logging.getLogger("mlx_packs.serving")
_ENDING = "The server is shutting down."


class Worker:
    """A thread that runs what it is handed, and between that its own `step` while there is work.

    Everything that belongs to the model is touched by this thread alone, so nothing is locked.
    """

    def __init__(self) -> None:
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="packs-serve", daemon=True)
        self._closing: float | None = None  # when it must have ended
        self._began: Future[None] = Future()
        self._has_ended = False
        self.steps = 0

    def start(self) -> None:
        """Begin to compute; raise what `on_start` raises."""
        self._thread.start()
        self._began.result()

    @property
    def is_alive(self) -> bool:
        """Whether requests are computed."""
        return self._thread.is_alive() and self._closing is None

    def post(self, function: Callable[[], None]) -> None:
        """Let the thread run a function before its next step; what it raises is logged alone."""
        self._commands.put(function)
        if self._has_ended:  # nobody else will
            self._take_commands()

    def call(self, function: Callable[[], T]) -> "Future[T]":
        """Let the thread run a function, and return what will have its result or its error."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self.post(run)
        return future

    async def result_of(self, function: Callable[[], T]) -> T:
        """Let the thread run a function, and return its result."""
        return await asyncio.wrap_future(self.call(function))

    def close(self, grace: float) -> None:
        """End the thread: at once if idle, else when its work is done or ``grace`` seconds over."""
        self._closing = time.monotonic() + grace
        self.post(lambda: None)
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            self.on_start()
        except BaseException as error:
            self._began.set_exception(error)
            return
        self._began.set_result(None)

        while self._closing is None or (self.is_busy() and time.monotonic() < self._closing):
            self._take_commands()
            if not self.is_busy():
                continue

            try:
                self.step()
            except BaseException as error:  # a panic of a library in Rust is no Exception
                log.exception("A step failed; its requests end with an error.")
                if not self._survives(exception_of(error)):
                    break
            self.steps += 1

        self._take_commands()
        try:
            self.on_end(PackError(_ENDING, "interrupted"))
        except Exception:
            log.exception("The server could not be put in order at its end.")

        self._has_ended = True
        self._take_commands()

    def _survives(self, error: Exception) -> bool:
        """Return whether the thread can go on after a step that failed."""
        try:
            self.on_failure(error)
        except Exception:
            log.exception("The server cannot continue after a failed step.")
            self._closing = time.monotonic()

        return self._closing is None or self._closing > time.monotonic()

    def _take_commands(self) -> None:
        """Run what waits now; where there is no other work, wait for it.

        What comes meanwhile is for after the next step, so that commands cannot keep it from work.
        """
        wait = not self.is_busy() and self._closing is None

        for _ in range(max(self._commands.qsize(), int(wait))):
            try:
                command = self._commands.get(block=wait)
            except Empty:
                return
            try:
                command()
            except Exception:
                log.exception("A command failed; the server continues.")
            wait = False

    def check_queue(self, is_full: bool, waiting: str) -> None:
        """Raise a PackError if no other request may wait; ``waiting`` says what does."""
        if self._closing is not None:
            raise PackError(_ENDING, "interrupted")
        if is_full:
            raise PackError(f"The queue is full: {waiting} wait. Try again later.", "busy")

    def on_start(self) -> None:
        """Do what must be done by the thread itself before anything else."""

    def is_busy(self) -> bool:
        raise NotImplementedError

    def step(self) -> None:
        raise NotImplementedError

    def on_failure(self, error: Exception) -> None:
        """End the requests that were computed when a step raised."""
        raise NotImplementedError

    def on_end(self, reason: PackError) -> None:
        """End what is left of all requests, and put the base back."""
        raise NotImplementedError


def exception_of(error: BaseException) -> Exception:
    """Return an error as one that ends a request alone."""
    if isinstance(error, Exception):
        return error
    return RuntimeError(repr(error))
