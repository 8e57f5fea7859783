"""A server at its limits while everything around it goes wrong: each request has one outcome."""

import asyncio
import http.client
import json
import os
import random
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from mlx_packs import Pack
from mlx_packs.serving.generation import TextWorker
from mlx_packs.serving.request import Limits
from tests.helpers.serving import SECONDS, Running, strict_json, until
from tests.serving.conftest import NAMES, serving

pytestmark = pytest.mark.slow
PATH = "/v1/completions"
PROMPTS = ("The list of", "def", "It was a fine day when Emma")
MODELS = ("base", *NAMES, "temporary")
TOKENS = 8
SOAK_SECONDS = 8
CLIENTS = 24  # beside 4 that are computed and 8 that wait


def body_of(model: str, prompt: str, **options: object) -> dict:
    return {"model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, **options}


class Faults(TextWorker):
    """A generator one of whose steps raises now and then."""

    every = 0

    def step(self) -> None:
        super().step()
        if self.every and self._running and self.steps % self.every == self.every - 1:
            raise RuntimeError("injected")


@pytest.fixture
def server(small_tiny, shelf):
    with serving(Faults(small_tiny, Limits(4, 8, 64 << 20, 64, 2048)), shelf) as running:
        yield running


class Clients:
    """Clients that send requests until the time is over, and count how each ended."""

    def __init__(self, server: Running, expected: dict) -> None:
        self.server, self.expected = server, expected
        self.end = time.monotonic() + SOAK_SECONDS
        self.counts: Counter[str] = Counter()
        self.wrong: list[object] = []
        self._lock = threading.Lock()

    def count(self, outcome: str) -> None:
        with self._lock:
            self.counts[outcome] += 1

    def run(self, number: int) -> None:
        rng = random.Random(number)
        kinds = (self.ask, self.read, partial(self.read, wait=0.02), self.vanish, self.send_half)
        while time.monotonic() < self.end:
            self.count("sent")
            model, prompt = rng.choice(MODELS), rng.choice(PROMPTS)
            rng.choices(kinds, (6, 4, 1, 2, 1))[0](rng, model, prompt)

    def open(self, body: dict) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=SECONDS)
        headers = {"Content-Type": "application/json"}
        connection.request("POST", PATH, json.dumps(body), headers)
        return connection

    def ask(self, rng: random.Random, model: str, prompt: str) -> None:
        status, headers, answer = self.server.request("POST", PATH, body_of(model, prompt))
        text = strict_json(answer)["choices"][0]["text"] if status == 200 else None
        self.judge(status, headers, model, prompt, text)

    def read(self, rng: random.Random, model: str, prompt: str, wait: float = 0.0) -> None:
        connection = self.open(body_of(model, prompt, stream=True))
        response = connection.getresponse()
        headers = dict(response.getheaders())
        lines = []
        while line := response.readline():
            lines.append(line)
            time.sleep(wait)
        connection.close()

        events = [line[6:].strip() for line in lines if line.startswith(b"data: ")]
        if response.status != 200:
            self.judge(response.status, headers, model, prompt, None)
        elif events[-1:] == [b"[DONE]"]:
            chunks = [strict_json(event)["choices"][0]["text"] for event in events[:-1]]
            self.judge(200, headers, model, prompt, "".join(chunks))
        else:
            error = strict_json(events[-1])["error"]
            self.judge(500 if error["type"] == "server_error" else 0, headers, model, prompt, None)

    def judge(self, status: int, headers: dict, model: str, prompt: str, text: str | None) -> None:
        self.count(f"{status}")
        if status == 429 and not int(headers.get("retry-after", 0)) >= 1:
            self.wrong.append(headers)
        if status == 404 and model != "temporary" or status not in (200, 404, 429, 500):
            self.wrong.append((status, model))
        if text is not None and text != self.expected[model, prompt]:
            self.wrong.append((model, prompt, text))

    def vanish(self, rng: random.Random, model: str, prompt: str) -> None:
        connection = self.open(body_of(model, prompt, max_tokens=500, stream=rng.random() < 0.5))
        time.sleep(rng.choice((0, 0.01, 0.1, 0.3)))
        connection.close()
        self.count("vanished")

    def send_half(self, rng: random.Random, model: str, prompt: str) -> None:
        data = json.dumps(body_of(model, prompt)).encode()
        text = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        whole = f"{text}Content-Length: {len(data)}\r\n\r\n".encode() + data
        with socket.create_connection(("127.0.0.1", self.server.port), SECONDS) as connection:
            connection.sendall(whole[: rng.randrange(len(whole))])
            time.sleep(rng.choice((0, 0.2)))
        self.count("half")


def swap_packs(server: Running, shelf, end: float) -> int:
    """Serve a pack, and serve it no more, while requests use it; how often."""
    worker, swaps = server.worker, 0
    while time.monotonic() < end:
        worker.call(lambda: worker.registry.add("temporary", Pack.open(shelf / "med"))).result()
        time.sleep(0.3)
        status, _ = server.json("DELETE", "/v1/packs/temporary")
        assert status == 200
        time.sleep(0.1)
        swaps += 1
    return swaps


def test_every_request_has_one_outcome(server, shelf):
    worker = server.worker
    expected = {}
    for model in MODELS:
        of = "med" if model == "temporary" else model
        for prompt in PROMPTS:
            status, answer = server.json("POST", PATH, body_of(of, prompt))
            assert status == 200
            expected[model, prompt] = answer["choices"][0]["text"]

    loop = server.loop
    tasks, descriptors = tasks_of(loop), len(os.listdir("/dev/fd"))
    slots = len(worker.registry.slots._loaded)
    worker.every = 97

    clients = Clients(server, expected)
    with ThreadPoolExecutor(CLIENTS + 1) as pool:
        swaps = pool.submit(swap_packs, server, shelf, clients.end)
        for client in [pool.submit(clients.run, i) for i in range(CLIENTS)]:
            client.result()
        assert swaps.result() > 3
    worker.every = 0

    assert not clients.wrong
    assert clients.counts.total() == 2 * clients.counts["sent"]
    for outcome in ("200", "429", "500", "vanished", "half"):
        assert clients.counts[outcome] > 0, clients.counts

    until(lambda: worker.counts == (0, 0))
    assert worker.is_alive and server.json("GET", "/health")[1]["status"] == "ok"
    entries = worker.registry._entries.values()
    assert {entry.name: entry.users for entry in entries} == dict.fromkeys(("base", *NAMES), 0)
    assert len(worker.registry.slots._loaded) <= slots + 1
    assert sum(loaded is not None for loaded in worker.registry.slots._loaded) == 3
    until(lambda: tasks_of(loop) <= tasks)
    until(lambda: len(os.listdir("/dev/fd")) <= descriptors + 1)
    for (model, prompt), text in expected.items():
        if model != "temporary":
            _, answer = server.json("POST", PATH, body_of(model, prompt))
            assert answer["choices"][0]["text"] == text


def tasks_of(loop: asyncio.AbstractEventLoop) -> int:
    """How many tasks a loop in another thread has, beside the one that counts."""

    async def count() -> int:
        return len(asyncio.all_tasks()) - 1

    return asyncio.run_coroutine_threadsafe(count(), loop).result(SECONDS)
