"""Server, feedback, `packs learn` and the swap, each as its own process."""

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.helpers.serving import Running, until

ROOT = Path(__file__).parents[2]
PACKS = [sys.executable, "-m", "mlx_packs.cli.main"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


class Server(Running):
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

    def content(self, text: str) -> str:
        return self.chat("learned", text)["choices"][0]["message"]["content"]


def packs(folder: Path, *args: str) -> str:
    done = subprocess.run(
        [*PACKS, *args], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.nightly(seconds=40)  # 70 answers, a training and two starts of a server
def test_a_server_learns_from_feedback(tmp_path):
    with Server(tmp_path, "--model", "tiny", "--learn", "d") as server:
        assert "learned, version 0" in server.announced[2]
        for number in range(70):
            answer = server.chat("learned", f"Say {number}.", max_tokens=4)
            said = {"id": answer["id"], "rating": "down", "correction": f"It is {number}."}
            assert server.json("POST", "/v1/feedback", said)[0] == 200

        before = server.content("Say 100.")
        flags = ("--task", "lm", "--iters", "40", "--learning-rate", "2e-3", "--quiet")
        assert packs(tmp_path, "learn", "d", *flags).startswith("swapped")
        until(lambda: bool(server.json("GET", "/v1/packs")[1]["data"]))
        after = server.content("Say 100.")
        assert after != before and after.startswith("It is")

    with Server(tmp_path, "--learn", "d") as server:  # base and version are of the folder
        assert "learned, version 1" in server.announced[2]
        assert server.content("Say 100.") == after
        packs(tmp_path, "learn", "d", "--use", "0")
        until(lambda: not server.json("GET", "/v1/packs")[1]["data"])
        assert server.content("Say 100.") == before
