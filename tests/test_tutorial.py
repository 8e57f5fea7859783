"""The tutorial: its commands, in order and as written, in an empty folder on the real model and data.

Its section about a model that we have not run is left out; test_documents.py checks the flags there.
"""

import csv
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

from benchmarks.real import files, jobs
from tests.helpers import documents
from tests.helpers.documents import ROOT

pytestmark = pytest.mark.real

PAGE = "docs/tutorial.md"
NOT_RUN = "## The same with Qwen3-4B"
SCRIPT = "prepare.py"
INSTRUCTION = "Intent of this message to a bank: "
SERVER = "http://127.0.0.1:8080"
START_S = 300
# So that the test takes minutes: a shorter run, and fewer examples to evaluate it on.
SHORTER = {
    "--iters 40": "--iters 16 --test-batches 1",
    "--limit 100": "--limit 16",
    "merge packs/intents --data intents": "merge packs/intents --data intents --rows 8",
}
# Exit codes of curl: no such name, no connection, no answer in time.
NO_NETWORK = (6, 7, 28)


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

    def follow(self, language: str, block: str) -> None:
        """Save, start or run a block."""
        if language == "python":
            (self._folder / SCRIPT).write_text(block, encoding="utf-8")
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
        if block.startswith("curl -O ") and result.returncode in NO_NETWORK:
            write_tables(self._folder)
        else:
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


def blocks() -> list[tuple[str, str]]:
    """Language and text of the blocks that a reader saves (Python) or runs (bash)."""
    text, section, _ = (ROOT / PAGE).read_text("utf-8").partition(NOT_RUN)
    assert section
    return list(documents.parse(PAGE, text).blocks("bash", "python"))


def write_tables(folder: Path) -> None:
    """Write the files that the page downloads, from the same messages as chats."""
    for name, splits in {"train": ("train", "valid"), "test": ("test",)}.items():
        with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            table.writerow(("text", "category"))
            for row in (row for split in splits for row in jobs.read_rows("banking77", split)):
                question, answer = (message["content"] for message in row["messages"])
                table.writerow((question.removeprefix(INSTRUCTION), answer.replace(" ", "_")))


def test_the_commands_of_the_tutorial_do_what_the_page_says(here):
    try:
        files.smollm2(), files.data("banking77")
    except files.Missing as error:
        pytest.skip(str(error))

    assert all((ROOT / PAGE).read_text("utf-8").count(written) for written in SHORTER)
    reader = Reader(here)
    try:
        for language, block in blocks():
            reader.follow(language, block)
    finally:
        reader.stop_server()

    report = json.loads((here / "packs/intents-run/report.json").read_text())
    assert report["ppl_after"] < 0.1 * report["ppl_before"]

    accuracy = re.findall(r"token accuracy ([\d.]+)%", reader.printed["packs eval"])
    assert len(accuracy) == 2 and float(accuracy[1]) > 25 + float(accuracy[0])
    assert re.search(r"^exact +[\d.]+ .*→ [\d.]+ ", reader.printed["packs eval"], re.M)

    served = json.loads(reader.printed["curl -s"])["choices"][0]["message"]["content"]
    assert served and served == reader.printed["packs generate"].strip()
