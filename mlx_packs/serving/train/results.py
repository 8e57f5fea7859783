"""Results of requests that clients come back for: computed in the background, kept for a while."""

import asyncio
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import Coroutine
from typing import Any

from ...errors import PackError
from ..http import public_message

log = logging.getLogger("mlx_packs.serving")
Result = bytes | dict[str, Any]  # a message of Protocol Buffers, or JSON
_KEPT_BYTES = 256 << 20
_KEPT = 4096  # results
_JSON_BYTES = 256  # of a result that is no message
_LAST_SECONDS = 2.0  # in which clients can fetch their results when nothing is computed any more
_OF_SERVER = ("unwritable", "unreadable", "interrupted", "memory")  # codes of errors
_ENDED = "The server is shutting down. Continue from a saved state on another one."


class Results:
    """Results by the id of their request.

    The oldest results go when there are too many, and a client that asks for one of them is told
    that it is gone. What a server at its end does not compute has an error as its result: clients
    that find no server would ask for it for ever.
    """

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[Result]] = {}
        self._sizes: OrderedDict[str, int] = OrderedDict()  # of finished results, in bytes
        self._is_ending = False
        self._unread: set[str] = set()
        self._of_keys: OrderedDict[object, str] = OrderedDict()

    @property
    def running(self) -> int:
        """Requests that are not computed yet."""
        return len(self._tasks) - len(self._sizes)

    def known(self, key: object) -> str | None:
        """Return the id of a request that a client sends again, since its answer was lost."""
        return self._of_keys.get(key)

    def start(self, work: Coroutine[Any, Any, Result], key: object = None) -> str:
        """Begin to compute a result, and return its id; PackError if the server shuts down."""
        if self._is_ending:
            work.close()
            raise PackError(_ENDED, "interrupted")

        request_id = uuid.uuid4().hex
        task = asyncio.create_task(_answered(work))

        self._tasks[request_id] = task
        self._unread.add(request_id)
        task.add_done_callback(lambda done: self._keep(request_id, done))

        if key is not None:
            self._of_keys[key] = request_id
            if len(self._of_keys) > _KEPT:
                self._of_keys.popitem(last=False)

        return request_id

    async def wait(self, request_id: str, seconds: float) -> Result | None:
        """Return a result, or None if it takes longer; a KeyError if nothing is known of it."""
        task = self._tasks[request_id]
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            return None
        result = self._result_of(task)
        if result is None:
            raise KeyError(request_id)

        self._unread.discard(request_id)
        return result

    def cancel(self, request_id: str) -> None:
        if (task := self._tasks.get(request_id)) is not None:
            task.cancel()

    async def end(self, grace: float) -> None:
        """Start nothing more; return when clients have their results.

        After ``grace`` seconds an error is the result of what is not computed.
        """
        self._is_ending = True
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=grace)
        self.abort()

        end = time.monotonic() + _LAST_SECONDS
        while self._unread and time.monotonic() < end:
            await asyncio.sleep(0.02)

    def abort(self) -> None:
        """Start nothing more, and compute nothing more."""
        self._is_ending = True
        for task in list(self._tasks.values()):
            task.cancel()

    def _result_of(self, task: asyncio.Task[Result]) -> Result | None:
        """Return what a task came to; None if its client has cancelled it."""
        if not task.cancelled():
            return task.result()
        if self._is_ending:
            return {"error": _ENDED, "category": "server"}
        return None

    def _keep(self, request_id: str, task: asyncio.Task[Result]) -> None:
        result = self._result_of(task)
        if result is None:
            self._forget(request_id)
            return

        self._sizes[request_id] = len(result) if isinstance(result, bytes) else _JSON_BYTES
        while len(self._sizes) > _KEPT or sum(self._sizes.values()) > _KEPT_BYTES:
            oldest, _ = self._sizes.popitem(last=False)
            self._forget(oldest)

    def _forget(self, request_id: str) -> None:
        del self._tasks[request_id]
        self._unread.discard(request_id)


async def _answered(work: Coroutine[Any, Any, Result]) -> Result:
    """Return what a request comes to; an error as the protocol has it."""
    try:
        return await work
    except PackError as error:
        category = "server" if error.code in _OF_SERVER else "user"
        return {"error": public_message(error), "category": category}
    except TimeoutError:
        return {"error": "The request took too long.", "category": "server"}
    except Exception as error:
        log.error("A request failed.", exc_info=error)
        reason = "Internal error. The server's log has the reason."
        return {"error": reason, "category": "server"}
