"""The tutorial: its commands, in order and as written, in an empty folder on the real model and data.

Its section about a model that we have not run is left out; test_documents.py checks the flags there.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from benchmarks.real import files
from tests.helpers import documents
from tests.helpers.documents import ROOT

pytestmark = [pytest.mark.real, pytest.mark.nightly(seconds=400)]

PAGE = "docs/tutorial.md"
NOT_RUN = "## The same with Qwen3-4B"
MODEL = "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
SERVER = "http://127.0.0.1:8080"
START_S = 300
# So that the test takes minutes: a shorter run, and fewer examples to evaluate it on.
SHORTER = {
    "--iters 75": "--iters 8 --test-batches 1",
    "--limit 100": "--limit 8",
    "merge packs/requests --data requests": "merge packs/requests --data requests --rows 4",
}


class Reader:
    """Someone who follows the page in a folder, with a cache of their own.

    printed: the output of each block of commands, by the command and subcommand that it starts with.
    """

    def __init__(self, folder: Path):
        self.printed: dict[str, str] = {}
        self._folder = folder
        self._server: subprocess.Popen | None = None
        self._environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "MLX_PACKS_CACHE": str(folder / "cache"),
        }

    def follow(self, block: str) -> None:
        """Start or run a block; the model is not downloaded."""
        if block.startswith("hf download "):
            assert block.split()[3] == MODEL
            (self._folder / MODEL).symlink_to(files.qwen())
        elif block.startswith("packs serve "):
            self._start(block)
        else:
            for written, shorter in SHORTER.items():
                block = block.replace(written, shorter)
            self._run(block)

    def stop_server(self) -> None:
        """Press Ctrl-C where the server runs, if it does."""
        if self._server and self._server.poll() is None:
            self._server.send_signal(signal.SIGINT)
            assert self._server.wait(60) == 128 + signal.SIGINT

    def _run(self, block: str) -> None:
        result = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block],
            cwd=self._folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        print(f"$ {block}{result.stdout}", flush=True)
        assert result.returncode == 0, result.stdout
        self.printed[" ".join(block.split()[:2])] = result.stdout

    def _start(self, block: str) -> None:
        self._server = subprocess.Popen(
            ["bash", "-c", f"exec {block}"], cwd=self._folder, env=self._environment
        )
        deadline = time.monotonic() + START_S
        while not answers(f"{SERVER}/v1/models"):
            assert self._server.poll() is None, "the server ended"
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.5)


def answers(url: str) -> bool:
    """Whether a server answers there."""
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except OSError:  # no connection yet, or too slow an answer
        return False
    return True


def blocks() -> list[str]:
    """Return the blocks of commands that a reader runs."""
    text, section, _ = (ROOT / PAGE).read_text("utf-8").partition(NOT_RUN)
    assert section
    return [block for _, block in documents.parse(PAGE, text).blocks("bash")]


def test_the_commands_of_the_tutorial_do_what_the_page_says(here):
    try:
        files.qwen()
    except files.Missing as error:
        pytest.skip(str(error))

    assert all((ROOT / PAGE).read_text("utf-8").count(written) for written in SHORTER)
    (here / "mlx-packs").symlink_to(ROOT)
    reader = Reader(here)
    try:
        for block in blocks():
            reader.follow(block)
    finally:
        reader.stop_server()

    report = json.loads((here / "packs/requests-run/report.json").read_text())
    assert report["ppl_after"] < 0.3 * report["ppl_before"]

    accuracy = re.findall(r"token accuracy ([\d.]+)%", reader.printed["packs eval"])
    assert len(accuracy) == 2 and float(accuracy[1]) > 10 + float(accuracy[0])
    assert re.search(r"^json +[\d.]+ .*→ [\d.]+ ", reader.printed["packs eval"], re.M)

    served = json.loads(reader.printed["curl -s"])["choices"][0]["message"]["content"]
    assert served and served == reader.printed["packs generate"].strip()
