"""Requests that are wrong, hostile or given up: an error in OpenAI's form, and the server goes on."""

import http.client
import json
import re
import socket
from pathlib import Path

import pytest

from mlx_packs.serving.app import Server
from mlx_packs.serving.generation import TextWorker
from mlx_packs.serving.request import Limits
from tests.helpers.serving import SECONDS, Running, until
from tests.serving.conftest import serving

ROOT = Path(__file__).parents[2]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "The list"}]
BODY = {"model": "notes", "messages": MESSAGES, "max_tokens": 4, "temperature": 0}
TEXT = {"model": "notes", "prompt": "The list", "max_tokens": 4}
LONG = {"model": "notes", "prompt": "It was", "max_tokens": 2000, "logit_bias": {"5": 100}}
JSON = {"Content-Type": "application/json"}


def check(answer: bytes | dict) -> dict:
    """Assert that an error has OpenAI's form, and neither a traceback nor a folder; the error."""
    answer = answer if isinstance(answer, dict) else json.loads(answer)
    assert set(answer) == {"error"}
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    assert isinstance(error["type"], str) and error["type"].endswith(("_error", "_too_large"))
    assert not re.search(r"Traceback|\.py\b|File \"|/(tmp|home|root|usr|Users)/", error["message"])
    assert str(ROOT) not in error["message"] and len(error["message"]) < 2000
    return error


def rejected(server, path: str, body: object, status: int = 400, **headers: str) -> dict:
    code, _, answer = server.request("POST", path, body, headers)
    assert code == status, answer
    return check(answer)


@pytest.mark.parametrize("item", [b"1", b"[]"])
def test_a_body_of_very_many_values_is_not_parsed(shared_server, item):
    body = b'{"prompt": [' + (item + b",") * 300_000 + b"1]}"
    message = rejected(shared_server, COMPLETIONS, body)["message"]
    assert ("lists" if item == b"[]" else "values") in message


def test_an_unknown_model_names_those_that_are_known(shared_server):
    for path, body in ((CHAT, BODY), (CHAT, BODY | {"stream": True}), (COMPLETIONS, TEXT)):
        error = rejected(shared_server, path, body | {"model": "other"}, 404)
        assert error["param"] == "model" and error["code"] == "not-found"
        for name in ("other", "base", "notes", "law", "med"):
            assert name in error["message"]
    error = rejected(shared_server, CHAT, BODY | {"model": "notes+law:0.5"}, 404)
    assert "packs combine" in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"model": "notes", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "notes", "messages": [{"role": "user", "content": "\xed\xa0\x80"}]}',
        b"[" * 100_000 + b"]" * 100_000,
        b'{"model": "notes", "max_tokens": ' + b"9" * 5000 + b"}",
        json.dumps(BODY).encode() + b"x",
        b'\xef\xbb\xbf{"model": "notes"}',
    ],
    ids=lambda body: repr(body[:40]),
)
def test_what_is_not_the_json_of_a_request(shared_server, body):
    for path in (CHAT, COMPLETIONS, "/v1/packs"):
        rejected(shared_server, path, body)


def says(content: object) -> list[dict]:
    return [{"role": "user", "content": content}]


FIELDS = {
    "model": [5, "", "x" * 2000],
    "messages": [
        [],
        "text",
        [{"role": "nobody", "content": "a"}],
        says(5),
        *(says([{"type": kind, "text": "u"}]) for kind in (["text"], {"text": 1}, 5, "", "tool")),
    ],
    "max_tokens": [0, 1.5, "5", True, 10**30],
    "temperature": [-0.1, 2.1, "1", float("nan"), float("inf")],
    "top_p": [0],
    "min_p": [1],
    "presence_penalty": [float("-inf")],
    "logit_bias": [
        *({token: 1} for token in ("x", "4096", "9" * 5000)),
        {"5": 101},
        {str(i): 1 for i in range(1025)},
    ],
    "seed": [2**63, 10**400],
    "stop": [["x"] * 10_000, 5, [5], ["a", None], "x" * 1025],
    "n": [0, 9],
    "stream": ["yes"],
    "top_logprobs": [3],
    "response_format": [
        {"type": "json_schema"},
        {"type": "xml"},
        {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}},
    ],
    "tools": [[{"type": "function"}], [{"type": "code"}]],
    "tool_choice": ["required", "f", {"type": "function", "function": {"name": "f"}}],
    "reasoning_effort": ["high"],
    "x" * 5000: [1],
}


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, value) for field, values in FIELDS.items() for value in values],
    ids=lambda value: repr(value)[:30],
)
def test_wrong_fields_are_named(shared_server, field, value):
    error = rejected(shared_server, CHAT, BODY | {field: value})
    assert error["param"].startswith(field[:20]), error
    assert error["message"].startswith(field[:20]) and error["message"].endswith(".")
    assert not re.search("Input|should|validation|Field|dictionary|Body|Object", error["message"])


WRONG = {
    "prompt": [5, [], [[5]], [10**30], [4096], [-1], ["a", 5], ["a"] * 65, "", [""]],
    "suffix": ["x"],
    "best_of": [2],
    "logprobs": [0, 5],
    "echo": [True],
    "messages": [MESSAGES],
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in WRONG.items() for value in values]
)
def test_wrong_fields_of_a_text_completion(shared_server, field, value):
    rejected(shared_server, COMPLETIONS, TEXT | {field: value})


def test_texts_with_control_characters_are_texts(shared_server):
    text = "a\0b\x1b[31m\u202e<|im_end|>😀\r\n"
    messages = [{"role": "user", "content": text, "name": text}]
    assert shared_server.json("POST", CHAT, BODY | {"messages": messages})[0] == 200


def test_a_prompt_beyond_the_context_says_both_numbers(shared_server):
    error = rejected(shared_server, COMPLETIONS, TEXT | {"prompt": [5] * 2045})
    assert {"2045", "4", "2048"} <= set(re.findall(r"\d+", error["message"]))
    assert error["param"] == "prompt"
    error = rejected(shared_server, CHAT, BODY | {"messages": says("a " * 3000), "stream": True})
    assert error["param"] == "messages"


def test_what_the_template_rejects(shared_server, monkeypatch):
    tokenizer = shared_server.worker.base.tokenizer._tokenizer
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('no such turn') }}")
    assert "no such turn" in rejected(shared_server, CHAT, BODY)["message"]
    monkeypatch.setattr(tokenizer, "chat_template", "{% for")
    rejected(shared_server, CHAT, BODY)


def test_a_body_must_be_json_by_its_header(shared_server):
    data = json.dumps(BODY).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/jsonx", ""):
        rejected(shared_server, CHAT, data, 415, **{"Content-Type": kind})
    code, _ = shared_server.json("POST", CHAT, data, **{"Content-Type": "Application/JSON; a=b"})
    assert code == 200


def test_wrong_methods_and_paths(shared_server):
    for method, path, allowed in (("PUT", CHAT, "POST"), ("GET", "/v1/packs/notes", "DELETE")):
        status, headers, body = shared_server.request(method, path)
        assert status == 405 and allowed in headers["allow"] and check(body)
    for path in ("/v1", "/v2/models", "//", "/v1/models/%ff%00", "/../etc/passwd"):
        status, _, body = shared_server.request("GET", path)
        assert status == 404 and check(body), path


def test_paths_of_other_apis_name_the_route_to_use(shared_server):
    for path, route in (
        ("/v1/responses", CHAT),  # client.responses.create
        ("/v1/messages", CHAT),
        ("/api/chat", CHAT),
        ("/chat/completions", CHAT),  # a base URL without /v1
        ("/v1/v1/embeddings", "/v1/embeddings"),
        ("/completions", "/v1/completions"),
    ):
        error = rejected(shared_server, path, {}, 404)
        assert error["message"] == f"{path}: this server has no such route. Use {route}."


def head(path: str, *lines: str) -> bytes:
    text = "\r\n".join((f"POST {path} HTTP/1.1", "Host: localhost", *lines))
    return f"{text}\r\nContent-Type: application/json\r\n\r\n".encode()


def connect(server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), SECONDS)


def test_a_large_body_without_a_length_is_not_read_to_its_end(shared_server):
    chunk = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"  # of 1 MiB; there is no end of them
    chunked = head(CHAT, "Transfer-Encoding: chunked") + 10 * chunk
    for sent in (chunked, head(CHAT, "Content-Length: 104857600")):  # nor with a length
        with connect(shared_server) as connection:
            connection.sendall(sent)
            response = http.client.HTTPResponse(connection)
            response.begin()
            assert response.status == 413 and check(response.read())
    assert shared_server.json("GET", "/health")[0] == 200


@pytest.fixture
def narrow(small_tiny, shelf):
    """A server that computes one request at a time, and lets two wait."""
    with serving(TextWorker(small_tiny, Limits(1, 2, 64 << 20, 64, 2048)), shelf) as running:
        yield running


def begin(server, body: dict, path: str = COMPLETIONS) -> socket.socket:
    data = json.dumps(body).encode()
    connection = connect(server)
    connection.sendall(head(path, f"Content-Length: {len(data)}") + data)
    return connection


def test_clients_that_go_take_their_requests_with_them(narrow):
    worker = narrow.worker
    for options in ({"stream": True}, {}):
        running = begin(narrow, LONG | options)
        until(lambda: worker.counts == (1, 0))
        waiting = begin(narrow, LONG | options)
        until(lambda: worker.counts == (1, 1))

        waiting.close()  # while it waits in the queue
        until(lambda: worker.counts == (1, 0))
        if options:
            assert b"200" in running.recv(4096)

        running.close()  # in the middle of its text
        until(lambda: worker.counts == (0, 0))

        choice = narrow.chat("notes", "The list", n=2)["choices"][0]
        assert choice["message"]["content"]


def test_more_than_the_queue_holds_is_told_when_to_come_again(narrow):
    worker = narrow.worker
    connections = []
    for n in range(3):
        connections.append(begin(narrow, LONG))
        until(lambda n=n: worker.counts == (1, n))

    status, headers, body = narrow.request("POST", COMPLETIONS, TEXT)
    assert status == 429 and 1 <= int(headers["retry-after"]) < 3600
    assert check(body)["type"] == "rate_limit_error"
    rejected(narrow, COMPLETIONS, TEXT | {"model": "other"}, 404)  # which need not come again
    assert narrow.json("GET", "/health")[1] == {"status": "ok", "running": 1, "waiting": 2}

    for connection in connections:
        connection.close()
    until(lambda: worker.counts == (0, 0))

    assert rejected(narrow, COMPLETIONS, TEXT | {"n": 3})["param"] == "n"  # never has a place
    assert rejected(narrow, CHAT, BODY | {"n": 3})["param"] == "n"
    assert narrow.json("POST", COMPLETIONS, TEXT | {"n": 2})[0] == 200


def test_an_error_in_the_middle_of_a_stream_is_an_event(narrow, monkeypatch):
    def fails():
        raise RuntimeError("secret of /root/file.py")

    with begin(narrow, LONG | {"stream": True}) as connection:
        reader = connection.makefile("rb")
        while not reader.readline().startswith(b"data: "):
            pass
        monkeypatch.setattr(narrow.worker._generator, "next", fails)
        rest = b"".join(iter(reader.readline, b"0\r\n"))
    events = [line for line in rest.splitlines() if line.startswith(b"data: ")]
    assert check(events[-1].removeprefix(b"data: "))["type"] == "server_error"
    assert b"[DONE]" not in rest
    assert narrow.json("POST", COMPLETIONS, TEXT)[0] == 200


def test_a_request_that_takes_too_long(generator):
    with Running(generator, request_seconds=0.05) as server:
        error = rejected(server, COMPLETIONS, LONG | {"model": "base"}, 504)
        assert error["type"] == "timeout_error"
        until(lambda: generator.counts == (0, 0))


def test_a_connection_outlives_an_error_of_ours(shared_server, monkeypatch, caplog):
    def fails(_, entry):
        raise RuntimeError("a defect")

    connection = http.client.HTTPConnection("127.0.0.1", shared_server.port, timeout=SECONDS)
    monkeypatch.setattr(Server, "_model", fails)
    for path, status in (("/v1/models", 500), ("/health", 200), ("/v1/models", 500)):
        connection.request("GET", path)
        response = connection.getresponse()
        assert response.status == status and b"a defect" not in response.read()
    connection.close()
    assert "a defect" in caplog.text
