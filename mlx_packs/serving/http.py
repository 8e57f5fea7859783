"""What every route has in common: who is let in, in what time, how bodies are read, errors."""

import asyncio
import hmac
import ipaddress
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import anyio
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..config.data import DataConfig
from ..errors import PackError

T = TypeVar("T")
Handler = Callable[..., Awaitable[Response]]  # of a request, and its body if there is one
log = logging.getLogger("mlx_packs.serving")
_STATUS = {
    "not-found": 404,
    "unknown": 404,
    "mismatch": 409,
    "exists": 409,
    "conflict": 409,
    "busy": 429,
    "timeout": 504,
    "interrupted": 503,
    "network": 502,
    "unwritable": 507,
}
_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}
# The folders of an absolute path in a message, which are no business of clients; routes stay.
_FOLDERS = re.compile(r"(?<![^\s'\"(])/(?!v1/)(?:[^/\s:'\"]+/)+")
_OPEN = ("/", "/health")  # without a key
_READ = ("GET", "HEAD", "OPTIONS")  # without the token, as the paths that only compute
_BODY_SECONDS = 60.0
BODY_BYTES = 10_000_000
_RETRY_SECONDS = "5"


@dataclass(frozen=True)
class ServerSettings:
    """What a server allows.

    Attributes:
        api_key: that clients must send; empty lets all in.
        token: that clients must send with requests that change the server's state, such as its
            packs, if there is no key; empty asks for none.
        max_tokens: of an answer, where a request does not say.
        template_kwargs: variables of the chat template, where a request has none of its own.
        request_seconds: how long a request may take.
        host: the address that it listens on; on this machine's own, other names are rejected.
        max_pixels: of an image; larger ones are made smaller. 0 leaves all as they are.
        allow_urls: whether images that a request names by an HTTP URL are fetched.
    """

    api_key: str = ""
    token: str = ""
    max_tokens: int = 512
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    request_seconds: float = 600.0
    host: str = "127.0.0.1"
    max_pixels: int = DataConfig.max_pixels
    allow_urls: bool = False


class AccessGuard:
    """Lets a request through if it names this server and has the key or token that it needs."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, computing: Sequence[str]) -> None:
        self._app = app
        self._settings = settings
        self._computing = computing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        rejection = None
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            rejection = self._rejection(scope["method"], scope["path"], headers)
        await (rejection or self._app)(scope, receive, send)

    def _rejection(self, method: str, path: str, headers: Headers) -> Response | None:
        size = len(path) + sum(len(name) + len(value) for name, value in headers.raw)
        if len(headers.raw) > _HEADERS or size > HEADER_BYTES:
            return failure(431, f"A request has at most {_HEADERS} headers and 64 KB of them.")

        host = headers.get("host", "").rpartition("@")[2]
        name = host.partition(":")[0]
        if "[" in host:  # an IPv6 address
            name = host[: host.find("]") + 1].strip("[]")
        if is_loopback(self._settings.host) and not is_loopback(name):
            return failure(403, f"Host '{host:.80}': this server answers only this machine.")

        secret, reason = self._secret(method, path)

        scheme, _, sent = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            sent = headers.get("x-api-key", "")

        known = hmac.compare_digest(sent.strip().encode("latin-1"), secret.encode())
        if secret and not known:
            response = failure(401, reason)
            response.headers["WWW-Authenticate"] = "Bearer"
            return response
        return None

    def _secret(self, method: str, path: str) -> tuple[str, str]:
        """Return what a request must send, empty for nothing, and what to say if it is missing."""
        if self._settings.api_key:
            key = "" if path in _OPEN else self._settings.api_key
            return key, "The API key is missing or wrong. Send it as a bearer token."

        if method in _READ or path in self._computing:
            return "", ""
        return self._settings.token, (
            "This request changes the server, which needs the token that packs serve printed at "
            "its start. Send it as a bearer token."
        )


def is_loopback(name: str) -> bool:
    """Return whether a host is this machine, and reached by nobody else."""
    try:
        return name.lower() == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def failure(
    status: int, message: str, code: str | None = None, param: str | None = None
) -> JSONResponse:
    """Return an error as OpenAI's clients read it."""
    kind = _KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    error = {"message": message, "type": kind, "param": param, "code": code}
    return JSONResponse({"error": error}, status)


def error_response(error: BaseException) -> JSONResponse:
    if isinstance(error, HTTPException):
        response = failure(error.status_code, error.detail)
        response.headers.update(error.headers or {})  # Allow, of a wrong method
        return response

    if not isinstance(error, PackError):
        log.error("A request failed.", exc_info=error)
        return failure(500, "Internal error. The server's log has the reason.")

    status = _STATUS.get(error.code, 400)
    response = failure(status, public_message(error), error.code, error.flag)
    if status in (429, 503):
        response.headers["Retry-After"] = _RETRY_SECONDS
    return response


def no_route(path: str, routes: Iterable[str], usual: str) -> JSONResponse:
    """Return the error of a path without a handler, with the route of that name or the usual one.

    Clients have paths of their own (OpenAI's ``/v1/responses``), or a base URL without ``/v1``.
    """
    route = next((r for r in routes if r == f"/v1{path}" or path.endswith(r)), usual)
    if path == "/metrics":
        route = "/health"
    return failure(404, f"{path[:100]}: this server has no such route. Use {route}.", "not-found")


def public_message(error: PackError) -> str:
    """Return the message of an error as clients may read it: without folders of this machine."""
    return _FOLDERS.sub("", error.message)


async def read_body(request: Request, expected: str = "application/json") -> bytes:
    """Return a body of the ``expected`` type and at most `BODY_BYTES`.

    HTTPException 408 (slow), 413 or 415 otherwise.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != expected:
        raise HTTPException(415, f"The body must have Content-Type: {expected}.")

    too_large = HTTPException(413, f"The body is larger than {BODY_BYTES:,} bytes.")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > BODY_BYTES:
        raise too_large

    parts = []
    size = 0
    try:
        with anyio.fail_after(_BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > BODY_BYTES:
                    raise too_large
                parts.append(part)
    except TimeoutError:
        raise HTTPException(408, "The body took too long to arrive.") from None

    return b"".join(parts)


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Return what is waited for; raise ClientDisconnect when the client goes before."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()


class EventStream(StreamingResponse):
    """Server-sent events, given up when a client has not read them within ``seconds``.

    ``end`` is called when they have ended or the client has gone, be it before the first.
    """

    def __init__(self, events: AsyncIterator[str], seconds: float, end: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self.headers["Cache-Control"] = "no-cache"
        self._seconds = seconds
        self._events = events
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; their source ends with them, however they end."""
        try:
            with anyio.move_on_after(self._seconds):
                await super().__call__(scope, receive, send)
        finally:
            self._end()
            with anyio.CancelScope(shield=True):
                await self._events.aclose()  # type: ignore[attr-defined]  # it is a generator


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


_HEADER_SECONDS = 30.0
HEADER_BYTES = 64 << 10  # of a request, with its first line
_HEADERS = 100


class BoundedHeaders(H11Protocol):  # httptools, the faster parser, takes headers of any size
    """Closes a connection whose headers are larger than `HEADER_BYTES`, or take too long to come.

    Between requests uvicorn's own time of an idle connection holds, until a byte arrives.
    """

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._expect()
        else:
            self._forget()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def _expect(self) -> None:
        if self._late is None and not self.transport.is_closing():
            self._late = self.loop.call_later(_HEADER_SECONDS, self.transport.close)

    def _forget(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
