"""Server, feedback, `packs learn` and the swap, each as its own process."""

import http.client
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.helpers.serving import until

ROOT = Path(__file__).parents[2]
PACKS = [sys.executable, "-m", "mlx_packs.cli.main"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


class Server:
    """A process of `packs serve`, and requests to it."""

    def __init__(self, folder: Path, *args: str) -> None:
        command = [*PACKS, "serve", "--port", "0", "--grace", "1", "--no-key", *args]
        self.process = subprocess.Popen(
            command, cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> "Server":
        watchdog = threading.Timer(60, self.process.kill)
        watchdog.start()
        self.announced = [self.process.stdout.readline() for _ in range(3)]
        watchdog.cancel()
        match = re.search(r"http://127\.0\.0\.1:(\d+)/v1", self.announced[1])
        assert match, self.announced
        self.port = int(match[1])
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def json(self, method: str, path: str, body: object = None) -> tuple[int, dict]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        try:
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def chat(self, text: str, max_tokens: int = 4) -> tuple[int, dict]:
        messages = [{"role": "user", "content": text}]
        body = {"model": "learned", "messages": messages, "temperature": 0}
        return self.json("POST", "/v1/chat/completions", {**body, "max_tokens": max_tokens})


def packs(folder: Path, *args: str) -> str:
    done = subprocess.run(
        [*PACKS, *args], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.nightly  # 70 answers, a training and two starts of a server: 40 s
def test_a_server_learns_from_feedback_while_it_answers(tmp_path):
    with Server(tmp_path, "--model", "tiny", "--learn", "d") as server:
        assert "learned, version 0" in server.announced[2]
        for number in range(70):
            _, answer = server.chat(f"Say {number}.")
            said = {"id": answer["id"], "rating": "down", "correction": f"It is {number}."}
            assert server.json("POST", "/v1/feedback", said)[0] == 200

        before = server.chat("Say 100.", 12)[1]["choices"][0]["message"]["content"]
        statuses = []
        is_over = threading.Event()

        def ask() -> None:
            while not is_over.is_set():
                statuses.append(server.chat("Say 100.", 40)[0])

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            flags = ("--task", "lm", "--iters", "40", "--learning-rate", "2e-3", "--quiet")
            assert packs(tmp_path, "learn", "d", *flags).startswith("swapped")
            until(lambda: bool(server.json("GET", "/v1/packs")[1]["data"]))
            asked = len(statuses)
            until(lambda: len(statuses) > asked + 3, 30)
        finally:
            is_over.set()
            for thread in threads:
                thread.join()
        assert set(statuses) == {200} and len(statuses) > 10

        after = server.chat("Say 100.", 12)[1]["choices"][0]["message"]["content"]
        assert after != before and after.startswith("It is")

    with Server(tmp_path, "--learn", "d") as server:  # base and version are of the folder
        assert "learned, version 1" in server.announced[2]
        assert server.chat("Say 100.", 12)[1]["choices"][0]["message"]["content"] == after
        packs(tmp_path, "learn", "d", "--use", "0")
        until(lambda: not server.json("GET", "/v1/packs")[1]["data"])
        assert server.chat("Say 100.", 12)[1]["choices"][0]["message"]["content"] == before
