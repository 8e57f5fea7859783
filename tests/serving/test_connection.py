"""Headers that never end or are too large: the connection is closed, and no other is."""

import json
import socket
import time

import pytest

from mlx_packs.serving import http

HALF = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Le"
HEALTH = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
SECONDS = 0.3  # of headers, here


@pytest.fixture
def connect(shared_server, monkeypatch):
    monkeypatch.setattr(http, "_HEADER_SECONDS", SECONDS)

    def connect() -> socket.socket:
        return socket.create_connection(("127.0.0.1", shared_server.port), timeout=20)

    return connect


@pytest.mark.parametrize("sent", [b"", HALF], ids=["nothing", "half a header"])
def test_headers_must_arrive_in_time(connect, sent):
    with connect() as client:
        began = time.monotonic()
        client.sendall(sent)
        assert client.recv(1) == b""
        assert time.monotonic() - began >= 0.9 * SECONDS


def test_headers_of_a_second_request_must_arrive_in_time(connect):
    with connect() as client:
        client.sendall(HEALTH)
        answer = b""
        while not answer.endswith(b"}"):  # headers and body may come apart
            answer += client.recv(10_000)
        assert b"200 OK" in answer
        client.sendall(HALF)
        assert client.recv(1) == b""


def test_a_header_byte_by_byte_takes_no_longer(connect):
    with connect() as client, pytest.raises(OSError):  # closed before the last byte
        for byte in HALF * 20:
            client.sendall(bytes([byte]))
            time.sleep(0.02)


def test_bodies_and_answers_may_take_longer(connect):
    body = json.dumps({"model": "base", "prompt": "The sea", "max_tokens": 4}).encode()
    head = HALF.replace(b"/chat", b"") + b"ngth: %d\r\nContent-Type: application/json\r\n\r\n"
    with connect() as client:
        client.sendall(head % len(body))
        time.sleep(1.5 * SECONDS)
        client.sendall(body)
        assert b"200 OK" in client.recv(10_000)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"X: " + b"a" * 60_000, b" 200 "),
        (b"X: " + b"a" * 70_000, b" 431 "),
        (b"\r\n".join(b"X-%d: a" % i for i in range(99)), b" 200 "),
        (b"\r\n".join(b"X-%d: a" % i for i in range(100)), b" 431 "),
    ],
    ids=["60 KB", "70 KB", "100 headers", "101 headers"],
)
def test_headers_are_bounded(connect, head, status):
    with connect() as client:
        client.sendall(HEALTH[:-2] + head + b"\r\n\r\n")
        assert status in client.recv(10_000).partition(b"\r\n")[0]


def test_a_header_without_end_is_not_kept(connect):
    with connect() as client:
        client.sendall(HEALTH[:-2] + b"X: " + b"a" * 50_000)
        with pytest.raises(OSError):  # closed: no more is read
            for _ in range(100):
                client.sendall(b"a" * 1_000_000)
