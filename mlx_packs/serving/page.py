"""The page to try the models of a server: alone, or in a program that passes its requests on."""

import base64
import hashlib
import re
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from urllib.parse import urlsplit

import anyio.to_thread
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ..errors import PackError
from .http import error_response, read_body, unless_gone

# What the page asks a server for.
ASKED = {
    "/v1/models": "GET",
    "/v1/packs": "GET",
    "/v1/chat/completions": "POST",
    "/v1/embeddings": "POST",
    "/v1/feedback": "POST",
}
_FILE = Path(__file__).with_name("page.html")
_NO_HEADER = "<!-- A program that shows this page puts its header here. -->"
_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)
_ANSWER_S = 660.0
_CHUNK = 1 << 16


def page(header: str = _NO_HEADER) -> str:
    """Return the page; ``header`` is HTML of a program that passes its requests to a server.

    An element of it with the identity ``api`` has the address of that server as its value.
    """
    return _FILE.read_text(encoding="utf-8").replace(_NO_HEADER, header, 1)


def policy_with(html: str, policy: str) -> str:
    """Return a policy that allows the inline style and script of a page, beside its own."""
    for tag, text in _INLINE.findall(html):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        policy = policy.replace(f"{tag}-src 'self'", f"{tag}-src 'self' 'sha256-{digest}'")
    return policy


async def pass_on(request: Request, address: str, token: str) -> Response:
    """Pass a request of the page to a server, and return its answer as it comes."""
    connection = HTTPConnection(urlsplit(address).netloc, timeout=_ANSWER_S)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}

    def ask() -> HTTPResponse:
        connection.request(request.method, request.url.path, body, headers)
        return connection.getresponse()

    try:
        body = await read_body(request) if request.method == "POST" else None
        asked = anyio.to_thread.run_sync(ask, abandon_on_cancel=True)
        answer = await unless_gone(request, asked)
    except BaseException as error:
        _hang_up(connection)
        if not isinstance(error, OSError):
            raise
        return error_response(PackError("The model does not answer any more.", "interrupted"))
    parts = _parts(connection, answer)
    return StreamingResponse(parts, answer.status, media_type=answer.headers["content-type"])


async def _parts(connection: HTTPConnection, answer: HTTPResponse) -> AsyncIterator[bytes]:
    read = partial(answer.read1, _CHUNK)
    try:
        while part := await anyio.to_thread.run_sync(read, abandon_on_cancel=True):
            yield part
    finally:
        _hang_up(connection)


def _hang_up(connection: HTTPConnection) -> None:
    """Close a connection, also while a thread waits for its answer."""
    if connection.sock is not None:
        with suppress(OSError):
            connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
