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
from contextlib import closing
from pathlib import Path

import pytest

from mlx_packs.cli import serve
from mlx_packs.serving import running
from tests.helpers.errors import check, raises
from tests.helpers.packs import edit_manifest, random_pack

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(shared_tiny, tmp_path_factory):
    """A folder ``packs`` with two packs."""
    folder = tmp_path_factory.mktemp("served")
    for seed, name in enumerate(("notes", "law")):
        random_pack(shared_tiny, seed, 2, ("q_proj",)).save(folder / "packs" / name)
    return folder


def connected(port: int, method: str, path: str, body: object = None, **headers: str):
    """A connection on which this was asked; it has the response."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    data = None if body is None else json.dumps(body)
    connection.request(method, path, data, {"Content-Type": "application/json", **headers})
    connection.response = connection.getresponse()
    return connection


def test_it_announces_its_address_and_answers_until_ctrl_c(folder, run, monkeypatch):
    """The key of the environment is asked for."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("MLX_PACKS_API_KEY", "secret")
    answers, announce = [], serve._announce
    body = {"model": "mine", "prompt": "The list", "max_tokens": 3}

    def ask(port: int) -> None:
        try:
            for headers in ({}, {"Authorization": "Bearer secret"}):
                with closing(connected(port, "POST", "/v1/completions", body, **headers)) as c:
                    answers.append((c.response.status, json.loads(c.response.read())))
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    def announced(names, listening, settings) -> None:
        announce(names, listening, settings)
        threading.Thread(target=ask, args=(listening.getsockname()[1],)).start()

    monkeypatch.setattr(serve, "_announce", announced)
    code, out, err = run("serve", "--port", 0, "--packs", "packs", "--pack", "mine=packs/notes")
    first, second, *_ = out.splitlines()
    assert set(re.findall(r"\w+", first)) == {"serving", "base", "mine", "law", "notes"}
    assert re.search(r"http://127\.0\.0\.1:\d+/v1", second)
    (rejected, _), (status, answer) = answers
    assert (rejected, status) == (401, 200) and answer["usage"]["completion_tokens"] <= 3
    assert code == 130 and err.splitlines()[-1].startswith("packs: ")


@pytest.mark.parametrize(
    ("args", "key"), [((), ""), (("--no-key",), ""), ((), "tml-a")], ids=["token", "none", "key"]
)
def test_a_token_is_made_and_printed_without_a_key(folder, run, monkeypatch, args, key):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("MLX_PACKS_API_KEY", key)
    monkeypatch.setattr(running, "run", lambda *_: None)
    code, out, err = run("serve", "--port", 0, "--packs", "packs", *args)
    assert code == 0, err

    tokens = re.findall(r"tml-[\w-]{32}", out)
    if args or key:
        assert tokens == [] and "#" not in out
    else:
        of_page, alone = tokens
        assert of_page == alone and f"/#token={alone}\n" in out


def test_json_is_one_line_when_it_is_ready(folder, run, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(running, "run", lambda *_: None)
    code, out, err = run("serve", "--port", 0, "--pack", "packs/notes", "--json")
    ready = json.loads(out)
    assert (code, out.count("\n"), ready["models"]) == (0, 1, ["base", "notes"])
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+", ready["address"])
    assert ready["token"] in err and "serving   base, notes" in err and ready["memory_gb"] > 0

    code, out, _ = run("serve", "--port", 0, "--pack", "packs/gone", "--json")
    assert code == 2 and json.loads(out)["error"]["code"] == "not-found"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("numbers", "code"),
    [((signal.SIGTERM,), 143), ((signal.SIGHUP, signal.SIGINT), 129)],
    ids=["SIGTERM", "SIGHUP and Ctrl-C"],
)
def test_signals_end_it_while_a_client_still_reads(folder, numbers, code):
    body = {"model": "base", "prompt": "a", "max_tokens": 4000, "stream": True}
    body["logit_bias"] = {"5": 100}

    command = [sys.executable, "-m", "mlx_packs.cli.main", "serve", "--port", "0", "--grace", "1"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    server = subprocess.Popen(
        [*command, "--pack", "packs/notes"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        **pipes,
    )
    watchdog = threading.Timer(120, server.kill)
    watchdog.start()
    try:
        announced = server.stdout.readline() + server.stdout.readline()
        port = int(re.search(r"http://127\.0\.0\.1:(\d+)/v1", announced)[1])
        idle = connected(port, "GET", "/health")
        idle.response.read()  # and keeps its connection
        stream = connected(port, "POST", "/v1/completions", body)
        assert stream.response.status == 200
        assert stream.response.readline().startswith(b"data: ")

        for number in numbers:
            server.send_signal(number)
            time.sleep(0.3 if number != numbers[-1] else 0)

        _, err = server.communicate(timeout=60)
        rest = stream.response.read().splitlines()
        idle.close()
        stream.close()
    finally:
        watchdog.cancel()
        server.kill()

    assert server.returncode == code, err
    assert "Traceback" not in err and err.splitlines()[-1].startswith("packs: ")
    (last,) = [line for line in rest if line.startswith(b"data: ")][-1:]
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "interrupted"


@pytest.fixture
def inside(folder, monkeypatch):
    """The folder with the packs is the current one; nothing is ever served."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(serve, "_announce", lambda *_: pytest.fail("it serves"))


def test_a_port_in_use_is_said_before_anything_is_loaded(inside, rejected, nothing_is_loaded):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        check(rejected("serve", "--port", port, "--pack", "packs/notes"), "busy", "port", str(port))
    elsewhere = ("--port", 0, "--host", "192.0.2.1")
    check(rejected("serve", *elsewhere, "--pack", "packs/notes"), "busy", "port")


def test_answers_are_kept_by_one_server_of_a_pack_that_gives_texts(
    inside, rejected, folder, shared_tiny, tmp_path, monkeypatch
):
    copy = shutil.copytree(folder / "packs" / "notes", tmp_path / "vectors")
    edit_manifest(copy, lambda manifest: manifest.update(objective={"task": "embedding"}))
    with monkeypatch.context() as patch:
        patch.setattr(serve, "_load", lambda *_: pytest.fail("a base is loaded"))
        check(rejected("serve", "--port", 0, "--pack", copy, "--learn", "d"), "unsupported")
    assert not (folder / "d").exists()

    own = str(tmp_path / "d")
    serve._opened(own, shared_tiny, {})
    with serve._locked("learn", own, "kto.jsonl"):
        with raises("busy", "learn", "another server"), serve._locked("learn", own, "kto.jsonl"):
            pass


def test_one_server_saves_models_in_a_folder(inside, rejected, nothing_is_loaded, tmp_path):
    """A server that was killed leaves its lock file, which holds nobody up."""
    states = tmp_path / "states"
    args = ("serve", "--port", 0, "--model", "nowhere", "--train", states)
    check(rejected(*args), "not-found")
    code = (
        "import sys, time; from mlx_packs.cli.serve import _locked\n"
        "with _locked('train', sys.argv[1], 'server'): print('locked', flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", code, str(states)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        try:
            assert first.stdout.readline() == "locked\n"
            check(rejected(*args), "busy", "train", "another server", str(states))
        finally:
            first.kill()

    assert (states / ".server.lock").exists()
    check(rejected(*args), "not-found")
    assert list(states.iterdir()) == []


def test_a_missing_package_is_named(inside, rejected, monkeypatch):
    find, missing = serve.find_spec, serve._NEEDED[0]
    monkeypatch.setattr(serve, "find_spec", lambda name: None if name == missing else find(name))
    check(rejected("serve", "--pack", "packs/notes"), "dependency", None, missing, "[serve]")
