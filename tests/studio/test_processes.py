"""The studio as a process, with runs that train: killed, stopped, resumed in either place."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mlx_packs.cli.studio import run_shown
from mlx_packs.files import exclusive_writer
from mlx_packs.reading import sha256
from mlx_packs.studio import jobs
from mlx_packs.studio.runs import run_page, runs_of
from mlx_packs.training.run_folder import RunFolder
from mlx_packs.training.status import read_status
from tests.helpers.run_folders import make_run
from tests.helpers.serving import until
from tests.helpers.studio import Browser, studio

pytestmark = pytest.mark.slow

SMALL = {"model": "tiny", "data": "data/small.jsonl", "batch_size": "1", "rank": "2"}
SECONDS = 300  # of a machine that does other work, too


@pytest.fixture
def home(home):
    rows = [{"prompt": f"Say {n}", "completion": f"{n} it is"} for n in range(40)]
    (home / "data").mkdir()
    (home / "data" / "small.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return home


def folder(home, name: str) -> Path:
    return home / "packs" / f"{name}-run"


def state(home, name: str) -> str:
    return read_status(folder(home, name)).state


def packs(home, *arguments: object) -> None:
    command = [sys.executable, "-m", "mlx_packs", *map(str, arguments)]
    subprocess.run(command, cwd=home, check=True, capture_output=True)


def test_a_killed_studio_costs_a_run_nothing(home):
    with studio(home) as first:
        status, headers, _ = first.request("POST", "/example")
        assert (status, headers["location"]) == (303, "/runs/example")
        until(lambda: (read_status(folder(home, "example")).batch or 0) >= 20, SECONDS)
        first.process.send_signal(signal.SIGKILL)

    with studio(home) as second:
        start = time.monotonic()
        states = json.loads(second.request("GET", "/states")[2])
        print(f"seconds to the state after the restart: {time.monotonic() - start:.2f}")
        assert states["example"][0] == "training"
        assert second.request("POST", "/runs/example/stop")[0] == 303
        until(lambda: state(home, "example") == "stopped", SECONDS)
        batches = [line["batch"] for line in RunFolder(folder(home, "example")).metrics()]
        reports = [batch for batch in batches if batch % 10 == 0]
        assert reports == list(range(10, max(reports) + 1, 10))


@pytest.mark.nightly(seconds=20)
def test_a_stopped_run_continues_to_the_same_adapters(home):
    settings = {**SMALL, "iters": "60"}
    jobs.queue(home, "broken", settings)
    until(lambda: (read_status(folder(home, "broken")).batch or 0) >= 10, SECONDS)
    assert jobs.stop(home, "broken")
    until(lambda: state(home, "broken") == "stopped", SECONDS)
    page = run_page(home, "broken")
    assert 10 <= page["checkpoint"] < 60 and page["command"].endswith("--resume")

    jobs.resume(home, "broken")
    until(lambda: state(home, "broken") == "finished", SECONDS)
    jobs.queue(home, "whole", settings)
    until(lambda: state(home, "whole") == "finished", SECONDS)
    adapters = [home / "packs" / name / "adapters.safetensors" for name in ("broken", "whole")]
    assert sha256(adapters[0]) == sha256(adapters[1])

    jobs.resume(home, "whole", "70")  # train longer
    until(lambda: state(home, "whole") == "training", SECONDS)
    until(lambda: state(home, "whole") == "finished", SECONDS)
    assert run_page(home, "whole")["checkpoint"] == 70


@pytest.mark.nightly(seconds=20)
def test_a_run_of_a_terminal_is_killed_and_resumed_here(home):
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    flags += ["--iters=60", "--save-every=10", "--quiet"]
    command = [sys.executable, "-m", "mlx_packs", "train", *flags, "--out=packs/killed"]
    with subprocess.Popen(command, cwd=home, stderr=subprocess.DEVNULL) as process:
        until(lambda: len(RunFolder(folder(home, "killed")).checkpoints()) >= 2, SECONDS)
        process.kill()
    start = time.monotonic()
    until(lambda: state(home, "killed") == "stopped", 5)
    print(f"seconds until a killed run is stopped: {time.monotonic() - start:.2f}")

    jobs.resume(home, "killed")
    until(lambda: state(home, "killed") == "finished", SECONDS)
    packs(home, "train", *flags, "--out=packs/whole")
    adapters = [home / "packs" / name / "adapters.safetensors" for name in ("killed", "whole")]
    assert sha256(adapters[0]) == sha256(adapters[1])


@pytest.mark.nightly(seconds=20)
def test_a_stopped_run_is_resumed_in_a_terminal(home):
    jobs.queue(home, "tickets", {**SMALL, "iters": "200", "sample_every": "10"})
    until(lambda: RunFolder(folder(home, "tickets")).samples(), SECONDS)
    until(lambda: (read_status(folder(home, "tickets")).batch or 0) >= 20, SECONDS)
    os.kill(read_status(folder(home, "tickets")).process, signal.SIGTERM)
    until(lambda: state(home, "tickets") == "stopped", SECONDS)

    arguments = ["train", "--out=packs/tickets", "--resume", "--iters", 60, "--quiet"]
    packs(home, *arguments)
    (run,) = runs_of(home)[0]
    assert (run.state, run.progress) == ("finished", "Batch 60 of 60")


def test_the_page_of_a_run_ends_with_its_command(home, capfd, monkeypatch):
    make_run(home, "other", process=1)
    with run_shown(str(home / "packs" / "mine")):
        browser = Browser(capfd.readouterr().err.splitlines()[1])
        assert 'url=/?of-run"' in browser.first_page
        assert browser.request("GET", "/?of-run")[0] == 200  # the run has not begun
        with exclusive_writer(make_run(home, "mine", process=os.getpid())):
            status, headers, _ = browser.request("GET", "/?of-run")
    assert (status, headers["location"]) == (303, "/runs/mine")
    with pytest.raises(OSError):
        browser.request("GET", "/")
    assert capfd.readouterr() == ("", "")

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    with run_shown(str(home / "packs" / "mine")):
        browser = Browser(capfd.readouterr().err.splitlines()[1])
        threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]).start()
    assert "Ctrl-C" in capfd.readouterr().err
    with pytest.raises(OSError):
        browser.request("GET", "/")


def test_the_page_of_a_run_of_the_command_line(home, run, monkeypatch):
    monkeypatch.chdir(home)
    flags = ["--data=data/small.jsonl", "--iters=4", "--rank=2", "--batch-size=1", "--json"]
    code, out, err = run("train", *flags, "--open", "--out=packs/mine")
    assert code == 0 and json.loads(out)["pack"] == "packs/mine", err
