"""What clients send to a server: bodies of requests, and the bytes of HTTP around them."""

import json
import re
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

import h11

from mlx_packs import load_base
from mlx_packs.errors import PackError
from mlx_packs.serving.embedding import EmbeddingWorker
from mlx_packs.serving.generation import TextWorker
from mlx_packs.serving.request import Limits
from tests.fuzz.kind import SUBJECT, Kind, library
from tests.fuzz.subjects import write_base, write_pack_on
from tests.helpers.encoders import write_encoder
from tests.helpers.packs import random_pack
from tests.helpers.serving import Running, strict_json

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALLED = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"]}
COMMON = {"model": "one", "max_tokens": 1, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "seed": 1}
COMMON |= {"logit_bias": {"5": 1.5}, "stop": ["a", "bc"], "min_p": 0.1, "presence_penalty": 0.5}
TURNS = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "u"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALLED]},
    {"role": "tool", "content": "1", "tool_call_id": "c1"},
]
CHAT = {"messages": TURNS, "tools": [TOOL], "logprobs": True, "top_logprobs": 2, "stream": True}
CHAT |= {"stream_options": {"include_usage": True}}
CHAT |= {"chat_template_kwargs": {"enable_thinking": False}}
FORM = {"messages": [{"role": "user", "content": "u"}], "max_completion_tokens": 8}
FORM |= {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}
BODIES = {
    "chat": COMMON | CHAT,
    "form": COMMON | FORM,
    "completion": COMMON | {"prompt": ["a b"], "n": 2},
    "tokens": {"model": "one", "prompt": [5, 6], "max_tokens": 1},
    "embedding": {"model": "one", "input": ["a", "b c"], "encoding_format": "base64"},
    "pack": {"source": "one", "name": "two"},
}
PATHS = dict.fromkeys(("chat", "form"), "/v1/chat/completions")
PATHS |= dict.fromkeys(("completion", "tokens"), "/v1/completions")
PATHS |= {"embedding": "/v1/embeddings", "pack": "/v1/packs"}


def judge(status: int, answer: bytes) -> None:
    """Raise a PackError for a request that was rejected, and another error for a defect."""
    if status == 500 or not 200 <= status < 600:
        raise RuntimeError(f"status {status}: {answer[:500]!r}")
    if status >= 400:
        error = strict_json(answer)["error"]
        if set(error) != {"message", "type", "param", "code"}:
            raise RuntimeError(f"status {status}: {answer[:500]!r}")
        raise PackError(f"status {status}: {error['message'][:300]}")


class _Served(Kind):
    """A server of a small base and its pack."""

    def make(self, folder):
        self._open = ExitStack()
        base = write_base(folder.with_name("base"))
        write_pack_on(base, folder.with_name("packs") / "one")
        limits = Limits(8, 64, 64 << 20, 512, 340)
        self.server = self._serve(TextWorker(load_base(base), limits), folder.with_name("packs"))

    def _serve(self, worker: TextWorker | EmbeddingWorker, packs: Path) -> Running:
        worker.start()
        self._open.callback(worker.close, 0.0)
        return self._open.enter_context(Running(worker, packs))

    def close(self):
        self._open.close()

    def check_alive(self) -> None:
        """Raise an error if a worker has died."""
        if not self.server.worker.is_alive:
            raise RuntimeError("the worker has died")


class BodyKind(_Served):
    """The JSON of a request."""

    name = "body"
    words = (*BODIES["chat"], *BODIES["form"], "prompt", "input", "name", "source", "type", "text")
    words += ("role", "content", "one", "base", "one+one", "one:nan", "user", "json_object", "$ref")

    def make(self, folder):
        super().make(folder)
        folder.mkdir()
        for name, body in BODIES.items():
            (folder / f"{name}.json").write_text(json.dumps(body))
        encoder = write_encoder(folder.with_name("encoder"))
        packs = folder.with_name("encoders")
        random_pack(load_base(encoder), targets=()).save(packs / "one")
        self.embedding = self._serve(EmbeddingWorker(load_base(encoder), 8, 64), packs)

    chosen = "chat"

    def mutate(self, case):
        self.chosen = case.rng.choice(list(BODIES))
        case.edit(f"{self.chosen}.json")

    def _post(self, name: str) -> None:
        server = self.embedding if name == "embedding" else self.server
        body = Path(SUBJECT, f"{name}.json").read_bytes()
        status, headers, answer = server.request("POST", PATHS[name], body)
        self.check_alive()
        if headers.get("content-type", "").startswith("text/event-stream"):
            for event in answer.decode().split("\n\n"):
                if (data := event.removeprefix("data: ")) not in ("", "[DONE]"):
                    _check_event(strict_json(data))
            return
        judge(status, answer)
        content = strict_json(answer)
        if status == 201 and content["name"] != "one":
            judge(*server.request("DELETE", f"/v1/packs/{content['name']}")[::2])

    def cheap(self):
        return [library(lambda name=name: self._post(name), PATHS[name]) for name in BODIES]

    def calls(self, case):
        return [library(lambda: self._post(self.chosen), PATHS[self.chosen])]

    def check_alive(self) -> None:
        """Raise an error if one of the workers has died."""
        super().check_alive()
        if not self.embedding.worker.is_alive:
            raise RuntimeError("the worker of embeddings has died")


def _check_event(event: dict) -> None:
    if event.get("error", {}).get("type") == "server_error":
        raise RuntimeError(f"{event}")


_POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
_TEXT = b'{"model": "one", "prompt": "a", "max_tokens": 1}'
RAW = {
    "get": b"GET /v1/models/one?a=b HTTP/1.1\r\nHost: localhost:80\r\nAccept: */*\r\n\r\n",
    "metrics": b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "post": _POST + b"Content-Length: %d\r\n\r\n%s" % (len(_TEXT), _TEXT),
    "chunked": _POST
    + b"Transfer-Encoding: chunked\r\n\r\n%x;a=b\r\n%s\r\n0\r\nA: b\r\n\r\n" % (len(_TEXT), _TEXT),
    "old": b"GET /health HTTP/1.0\r\nHost: localhost\r\nAuthorization: Bearer x\r\n\r\n",
}
LINES = rb"""Host: example.org
Host: [::1
Host:
Content-Length: 5
Content-Length: -1
Content-Length: 99999999999999999999
Content-Length: 1, 1
Transfer-Encoding: chunked
Transfer-Encoding: gzip, chunked
Content-Encoding: gzip
Expect: 100-continue
Connection: Upgrade
Upgrade: websocket
Upgrade: h2c
Content-Type: application/json; charset=utf-16
 folded
X-Forwarded-For: ::1
: no name""".split(b"\n")
LINES += [b"Authorization: \xff\xfe", b"X: " + b"y" * 70_000, b"\xff\x00: a"]
FIRST = rb"""POST /v1/packs HTTP/1.1
OPTIONS * HTTP/1.1
GET http://localhost/health HTTP/1.1
HEAD / HTTP/1.1
CONNECT localhost:80 HTTP/1.1
GET /v1/models/%00%ff%2e%2e%2f HTTP/1.1
GET / HTTP/2.0
PRI * HTTP/2.0
get / HTTP/1.1
""".split(b"\n")
FIRST += [b"GET /" + b"a" * 9000 + b" HTTP/1.1", b"GET /\xc3\xa9 HTTP/1.1"]
_STATUS = re.compile(rb"(?:^|\n)HTTP/1\.1 (\d{3}) ")
_HEAD_BYTES = 1 << 16  # of headers, as uvicorn reads them
_SECONDS = 8.0


class RawKind(_Served):
    """The bytes of a request: its first line, headers, chunks."""

    name = "http"
    words = tuple(line.decode("latin-1") for line in LINES)

    def make(self, folder):
        super().make(folder)
        folder.mkdir()
        for name, data in RAW.items():
            (folder / f"{name}.http").write_bytes(data)

    chosen = "get"

    def mutate(self, case):
        rng = case.rng
        self.chosen = rng.choice(list(RAW))
        file = f"{self.chosen}.http"
        if rng.random() < 0.4:
            return case.edit(file)

        head, _, body = RAW[self.chosen].partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        for _ in range(rng.choice((1, 1, 2, 3))):
            at = rng.randrange(len(lines) + 1)
            kind = rng.choice(("add", "add", "delete", "double", "first", "swap"))
            case.mutator.note(f"{kind} at line {at}")

            if kind == "add":
                lines.insert(max(1, at), rng.choice(LINES))
            elif kind == "delete":
                del lines[at : at + 1]
            elif kind == "double":
                lines[at:at] = lines[at - 1 : at]
            elif kind == "first":
                lines[:1] = [rng.choice(FIRST)]
            else:
                rng.shuffle(lines)

        if rng.random() < 0.1:
            body = case.mutator.bytes(body)
        end = rng.choice((b"\r\n\r\n",) * 8 + (b"\n\n", b"\r\n", b"\r\n\r\n\r\n"))
        return case.write(file, b"\r\n".join(lines) + end + body)

    def _send(self, name: str) -> None:
        data = Path(SUBJECT, f"{name}.http").read_bytes()
        answer = b""
        with socket.create_connection(("127.0.0.1", self.server.port), _SECONDS) as connection:
            with suppress(ConnectionError):  # of a server that has read enough
                connection.sendall(data)
                if _is_answered(data):
                    answer = connection.recv(1 << 16)
                connection.shutdown(socket.SHUT_WR)
                while part := connection.recv(1 << 16):
                    answer += part

        self.check_alive()
        statuses = [int(status) for status in _STATUS.findall(answer)]
        if 500 in statuses or (_is_answered(data) and not statuses and answer):
            raise RuntimeError(f"{answer[:500]!r}")
        if not any(200 <= status < 300 for status in statuses):
            raise PackError(f"status {statuses}: rejected")

    def cheap(self):
        return [library(lambda name=name: self._send(name), f"{name}.http") for name in RAW]

    def calls(self, case):
        return [library(lambda: self._send(self.chosen), f"{self.chosen}.http")]


def _is_answered(data: bytes) -> bool:
    """Return whether a server that has read so much answers, instead of waiting for more."""
    if not data:
        return False

    reader = h11.Connection(h11.SERVER, _HEAD_BYTES)
    reader.receive_data(data)

    try:
        while True:
            event = reader.next_event()
            if event is h11.NEED_DATA or event is h11.PAUSED:
                return False
            if isinstance(event, h11.EndOfMessage):
                return True
    except h11.RemoteProtocolError:
        return True
