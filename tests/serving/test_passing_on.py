"""Requests that a program passes on to a server: its answer, and what is left when one side goes."""

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from mlx_packs.serving.page import pass_on
from tests.helpers.serving import RunningApp

EVENT = b"data: 1\n\n"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class Slow:
    """A server that answers one request with ``first``, and waits until its client has gone."""

    def __init__(self, first: bytes) -> None:
        self._first = first
        self.asked = threading.Event()
        self.left = threading.Event()
        self.request = b""
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        connection, _ = self._listening.accept()
        with self._listening, connection:
            while not self.request.endswith(b"{}"):
                self.request += connection.recv(1 << 16)
            connection.sendall(self._first)
            self.asked.set()
            while connection.recv(1 << 16):
                pass
        self.left.set()


@contextmanager
def passing_to(address: str) -> Iterator[RunningApp]:
    async def passed(request):
        return await pass_on(request, address, "secret")

    with RunningApp(Starlette(routes=[Route("/v1/chat", passed, methods=["POST"])])) as host:
        yield host


@pytest.mark.parametrize("first", [b"", HEAD + b"9\r\n" + EVENT + b"\r\n"], ids=["none", "some"])
def test_a_client_that_goes_ends_the_request_to_the_server(first):
    server = Slow(first)
    with passing_to(server.address) as host:
        client = http.client.HTTPConnection("127.0.0.1", host.port, timeout=30)
        headers = {"Content-Type": "application/json", "Cookie": "of=host", "Origin": "http://x"}
        client.request("POST", "/v1/chat", b"{}", headers)
        assert server.asked.wait(30)
        if first:
            assert client.getresponse().read1() == EVENT
        client.sock.shutdown(socket.SHUT_RDWR)
        assert server.left.wait(30)
        client.close()

    sent = server.request.lower()
    assert (
        b"authorization: bearer secret" in sent and b"cookie" not in sent and b"origin" not in sent
    )


def test_a_server_that_is_gone_is_an_error_of_one_line():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
    with passing_to(address) as host:
        status, _, body = host.request("POST", "/v1/chat", {})
    assert status == 503 and "does not answer" in json.loads(body)["error"]["message"]
