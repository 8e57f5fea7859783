"""A server in this process, and requests to it by the standard library alone."""

import asyncio
import http.client
import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette

from mlx_packs.learning.folder import LearningFolder
from mlx_packs.serving.app import Server, make_app
from mlx_packs.serving.feedback import Learning
from mlx_packs.serving.generation import TextWorker
from mlx_packs.serving.http import ServerSettings
from mlx_packs.serving.library import Library
from mlx_packs.serving.request import Finished, Progress, TextRequest
from mlx_packs.serving.running import config_of

SECONDS = 60


class PromptServer(uvicorn.Server):
    """A server that ends when it is told to, and not at its next tenth of a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._told = asyncio.Event()

    async def main_loop(self) -> None:
        await self.on_tick(0)  # writes the headers of answers
        await self._told.wait()

    def end(self) -> None:
        """End the server, from another thread."""
        self.should_exit = True
        self.servers[0].get_loop().call_soon_threadsafe(self._told.set)


class RunningApp:
    """A server of an application, on a free port of this machine; ends on leaving."""

    def __init__(self, app: Starlette) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._uvicorn = PromptServer(config_of(app, log_level="error"))
        self._thread = threading.Thread(
            target=self._uvicorn.run, kwargs={"sockets": [self._listening]}
        )

    def __enter__(self):
        self._thread.start()
        while not self._uvicorn.started:
            if not self._thread.is_alive():
                raise RuntimeError("the server ended")
            self._thread.join(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        loop = self.loop
        self._uvicorn.end()
        self._thread.join(10)
        if self._thread.is_alive():  # say what it waits for, and end it
            waiting = [repr(task) for task in asyncio.all_tasks(loop)]
            self._uvicorn.force_exit = True
            self._thread.join(SECONDS)
            raise AssertionError(f"the server did not end: {waiting}")

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop that answers, which runs in another thread."""
        return self._uvicorn.servers[0].get_loop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def request(
        self, method: str, path: str, body: object = None, headers: dict | None = None
    ) -> tuple[int, dict, bytes]:
        """Return status, headers and body of an answer; ``body`` is sent as JSON, bytes as they are."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        headers = dict(headers or {})
        if body is not None:
            headers.setdefault("Content-Type", "application/json")
            body = body if isinstance(body, bytes) else json.dumps(body).encode()

        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read()
        finally:
            connection.close()

    def json(self, method: str, path: str, body: object = None, **headers: str) -> tuple[int, dict]:
        status, _, answer = self.request(method, path, body, headers)
        return status, strict_json(answer)


class Running(RunningApp):
    """A server over a worker.

    ``training`` makes its training service from the settings; ``learning`` has rated answers.
    """

    def __init__(
        self,
        worker,
        folder: Path | None = None,
        training=None,
        learning: LearningFolder | None = None,
        **settings,
    ) -> None:
        self.worker, self.settings = worker, ServerSettings(**settings)
        self.library = Library(worker, folder)
        self.training = training and training(self.settings)
        self.learning = learning and Learning(learning, self.library)
        self.server = Server(worker, self.library, self.settings, self.training, self.learning)
        super().__init__(make_app(self.server))

    def __enter__(self) -> "Running":
        if self.library._folder is not None:
            self.library.scan()
        if self.learning is not None:
            self.learning.serve_current()
        return super().__enter__()

    def chat(self, model: str, text: str, **options: object) -> dict:
        """Return the answer to one message, greedily unless another temperature is asked for."""
        messages = [{"role": "user", "content": text}]
        body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 12, **options}
        status, answer = self.json("POST", "/v1/chat/completions", body)
        assert status == 200, answer
        return answer

    def events(self, path: str, body: dict) -> Iterator[dict]:
        """Yield the events of a stream, without the last."""
        status, headers, answer = self.request("POST", path, {**body, "stream": True})
        assert status == 200, answer
        assert headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in answer.decode().split("\n\n") if line]
        assert lines[-1] == "[DONE]"
        yield from map(strict_json, lines[:-1])


def until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait until something holds; fail if it does not."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came to hold"
        time.sleep(0.01)


def strict_json(text: str | bytes) -> Any:
    """Return what JSON says; NaN and Infinity, which Python alone reads, are none."""

    def reject(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=reject)


def texts_of(
    generator: TextWorker, requests: Sequence[tuple[str, list[int], int]], **options: object
) -> list[str | Exception]:
    """Return the text of each request (model, prompt, tokens), all submitted at once."""
    texts: list = ["" for _ in requests]
    ended: queue.Queue[int] = queue.Queue()

    def listener(i: int):
        def tell(event: object) -> None:
            if isinstance(event, Progress):
                texts[i] += "".join(piece.text for piece in event.pieces)
            elif isinstance(event, Exception):
                texts[i] = event
                ended.put(i)
            elif isinstance(event, Finished):
                ended.put(i)

        return tell

    for i, (model, prompt, tokens) in enumerate(requests):
        generator.submit(TextRequest(model, prompt, tokens, listener(i), **options))
    for _ in requests:
        ended.get(timeout=SECONDS)
    return texts
