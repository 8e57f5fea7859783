"""`packs serve` as a program: what it announces, how it ends, and what it rejects in one line."""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mlx_packs.cli import serve
from tests.helpers.errors import check
from tests.helpers.packs import edit_manifest, random_pack

ROOT = Path(__file__).parents[2]
SECONDS = 6  # that a server may take to end: 2, and a busy machine


@pytest.fixture(scope="module")
def folder(shared_tiny, tmp_path_factory):
    """A folder ``packs`` with two packs."""
    folder = tmp_path_factory.mktemp("served")
    for seed, name in enumerate(("notes", "law")):
        random_pack(shared_tiny, seed, 2, ("q_proj",)).save(folder / "packs" / name)
    return folder


class Process:
    """`packs serve ARGS` on a free port; it is killed at the end, should it still run."""

    def __init__(self, folder, *args: str, **environment: str) -> None:
        command = [
            sys.executable,
            "-m",
            "mlx_packs.cli.main",
            "serve",
            "--port",
            "0",
            "--grace",
            "1",
        ]
        command += args
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> "Process":
        watchdog = threading.Timer(60, self.process.kill)
        watchdog.start()
        self.announced = [self.process.stdout.readline(), self.process.stdout.readline()]
        watchdog.cancel()
        match = re.search(r"http://127\.0\.0\.1:(\d+)/v1", self.announced[1])
        assert match, self.process.communicate()
        self.port = int(match[1])
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def ask(self, method: str, path: str, body: object = None, **headers: str) -> tuple[int, dict]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            data = None if body is None else json.dumps(body)
            headers = {"Content-Type": "application/json", **headers}
            connection.request(method, path, data, headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def end(self, number: int) -> tuple[int, str, float]:
        """Send a signal; the exit code, what was printed to standard error, and the seconds."""
        began = time.monotonic()
        self.process.send_signal(number)
        _, err = self.process.communicate(timeout=60)
        return self.process.returncode, err, time.monotonic() - began


def test_it_announces_its_address_and_answers_until_ctrl_c(folder):
    """The key of the environment is asked for."""
    options = ("--packs", "packs", "--pack", "mine=packs/notes")
    with Process(folder, *options, MLX_PACKS_API_KEY="secret") as server:
        names = set(re.findall(r"\w+", server.announced[0]))
        assert names == {"serving", "base", "mine", "law", "notes"}
        body = {"model": "mine", "prompt": "The list", "max_tokens": 3}
        assert server.ask("POST", "/v1/completions", body)[0] == 401
        key = "Bearer secret"
        status, answer = server.ask("POST", "/v1/completions", body, Authorization=key)
        assert status == 200 and answer["usage"]["completion_tokens"] <= 3
        code, err, seconds = server.end(signal.SIGINT)
    assert code == 130 and seconds < SECONDS
    assert "Traceback" not in err and err.splitlines()[-1].startswith("packs: ")


@pytest.mark.parametrize(
    ("numbers", "code"),
    [
        ((signal.SIGTERM,), 143),
        pytest.param((signal.SIGHUP, signal.SIGINT), 129, marks=pytest.mark.slow),
    ],
    ids=["SIGTERM", "SIGHUP and Ctrl-C"],
)
def test_signals_end_it_while_a_client_still_reads(folder, numbers, code):
    body = {"model": "base", "prompt": "a", "max_tokens": 4000, "stream": True}
    body["logit_bias"] = {"5": 100}
    with Process(folder, "--pack", "packs/notes") as server:
        idle = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        idle.request("GET", "/health")
        idle.getresponse().read()  # and keeps its connection
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        assert response.status == 200 and response.readline().startswith(b"data: ")
        for number in numbers[:-1]:
            server.process.send_signal(number)
            time.sleep(0.3)
        exit_code, err, seconds = server.end(numbers[-1])
        rest = response.read().splitlines()
        idle.close()
        connection.close()
    assert exit_code == code and seconds < SECONDS, err
    assert "Traceback" not in err and err.splitlines()[-1].startswith("packs: ")
    (last,) = [line for line in rest if line.startswith(b"data: ")][-1:]
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "interrupted"


@pytest.fixture
def inside(folder, monkeypatch):
    """The folder with the packs is the current one; nothing is ever served."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(serve, "_announce", lambda *_: pytest.fail("it serves"))


@pytest.mark.parametrize(
    ("args", "code", "flag"),
    [
        (("--pack", "nowhere"), "not-found", None),
        (("--pack", "./nowhere"), "not-found", None),
        (("--pack", "x=nowhere"), "not-found", None),
        (("--pack", "~/nowhere"), "not-found", None),
        (("--packs", "nowhere"), "not-found", "packs"),
        (("--packs", "."), None, None),
        (("--model", "nowhere", "--pack", "packs/notes"), None, None),
        (("--pack", "packs/notes", "--pack", "notes=packs/law"), "conflict", "pack"),
        (("--pack", "base=packs/notes"), "invalid", "name"),
        (("--pack", "a b=packs/notes"), "invalid", "name"),
        (("--pack", "packs/notes", "--kv-memory", "nonsense"), "invalid", "kv_memory"),
        (("--pack", "packs/notes", "--kv-memory", "-1GB"), "invalid", "kv_memory"),
        (("--pack", "packs/notes", "--kv-memory", "0"), "invalid", "kv_memory"),
        (("--pack", "packs/notes", "--host", "no such host"), "busy", "port"),
        (("--port", "70000"), "invalid", "port"),
        (("--batch-size", "0"), "invalid", "batch_size"),
        (("--queue", "-1"), "invalid", "queue"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_served_is_one_line(inside, rejected, folder, args, code, flag):
    if args == ("--packs", "."):
        (folder / "empty").mkdir(exist_ok=True)
        args, code = ("--packs", "empty"), "invalid"
    port = () if "--port" in args else ("--port", "0")
    error = rejected("serve", *port, *args)
    assert code in (None, error.code) and flag in (None, error.flag), error.message


def test_a_port_in_use_is_said_before_anything_is_loaded(inside, rejected, nothing_is_loaded):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        check(rejected("serve", "--port", port, "--pack", "packs/notes"), "busy", "port", str(port))


def test_a_pack_of_another_base(inside, rejected, folder):
    shutil.copytree(folder / "packs" / "notes", folder / "other", dirs_exist_ok=True)
    edit_manifest(folder / "other", lambda m: m["base"].update(fingerprint="f" * 64))
    check(rejected("serve", "--port", 0, "--pack", "other"), "mismatch", None, "ffffff")
    error = rejected("serve", "--port", 0, "--pack", "packs/notes", "--pack", "other")
    check(error, "mismatch", None, "ffffff")


@pytest.mark.parametrize("missing", serve._NEEDED)
def test_a_missing_package_is_named(inside, rejected, monkeypatch, missing):
    find = serve.find_spec
    monkeypatch.setattr(serve, "find_spec", lambda name: None if name == missing else find(name))
    check(rejected("serve", "--pack", "packs/notes"), "dependency", None, missing, "[serve]")


def test_a_folder_in_the_home_is_named_as_it_is(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    assert list(serve._named(("~/packs/notes", "mine=~/packs/law"))) == ["notes", "mine"]


def test_settings_of_texts_are_rejected_for_an_encoder(inside, rejected, encoder):
    check(rejected("serve", "--model", str(encoder), "--kv-bits", "8"), "conflict", "kv_bits")
