"""Runs that the studio starts, stops and resumes: the queue, and what may not be started."""

import json
import os
import subprocess
import sys
import threading

import pytest

from mlx_packs.errors import PackError
from mlx_packs.files import exclusive_writer
from mlx_packs.sandbox.process import start_of
from mlx_packs.studio import jobs
from mlx_packs.studio.runs import run_page, runs_of
from mlx_packs.training.run_folder import RunFolder, run_folder
from tests.helpers.run_folders import RECIPE, make_run
from tests.helpers.serving import until

# Stands for `packs train`: holds the lock of its run until the file "end" exists.
TRAINS = """
import sys, time
from pathlib import Path
from mlx_packs.files import exclusive_writer
name = next(a for a in sys.argv if a.startswith("--out=")).removeprefix("--out=")
run = Path(name + "-run")
with open("started", "a") as file:
    file.write(run.name + "\\n")
with exclusive_writer(run):
    (run / "waiting.json").unlink()
    while not Path("end").exists():
        time.sleep(0.01)
"""
FAILS = "print('packs: --rank: is wrong.'); raise SystemExit(2)"


@pytest.fixture
def program(monkeypatch):
    def use(code: str) -> None:
        monkeypatch.setattr(jobs, "command_of", lambda *args: [sys.executable, "-c", code, *args])

    return use


def started(home) -> list[str]:
    file = home / "started"
    return file.read_text().split() if file.exists() else []


def wait(home, name: str, **settings: object) -> None:
    folder = run_folder(home / "packs" / name)
    folder.mkdir(exist_ok=True)
    (folder / "waiting.json").write_text(json.dumps({"settings": settings}))


def test_one_run_trains_and_the_next_one_follows(home, program):
    program(TRAINS)
    for name in ("first", "second", "third"):
        jobs.queue(home, name, {})
    until(lambda: jobs.training(home))
    assert [run.state for run in runs_of(home)[0]].count("waiting") == 2

    assert jobs.stop(home, "second") is False  # it leaves the queue, and no folder
    assert not run_folder(home / "packs" / "second").exists()
    (home / "end").touch()
    until(lambda: started(home) == ["first-run", "third-run"])
    until(lambda: not jobs.training(home))


def test_studios_that_start_runs_at_once_start_one(home, program):
    program(TRAINS)
    for n in range(3):
        wait(home, f"n{n}")
    studios = [threading.Thread(target=jobs.start_next, args=[home]) for _ in range(8)]
    for studio in studios:
        studio.start()
    for studio in studios:
        studio.join()
    until(lambda: jobs.training(home))
    jobs.start_next(home)
    assert started(home) == ["n0-run"]
    (home / "end").touch()
    until(lambda: len(started(home)) == 3 and not jobs.training(home))


def test_a_run_of_a_terminal_comes_first(home, program):
    program(TRAINS)
    (home / "end").touch()
    with exclusive_writer(make_run(home, "other")):
        jobs.queue(home, "tickets", {})
        assert started(home) == [] and runs_of(home)[0][0].state == "waiting"
    jobs.start_next(home)
    until(lambda: started(home) == ["tickets-run"])


def test_a_run_that_fails_early_is_not_started_again(home, program):
    program(FAILS)
    jobs.queue(home, "tickets", {})
    until(lambda: runs_of(home)[0][0].state == "failed")
    assert runs_of(home)[0][0].error == "packs: --rank: is wrong."
    jobs.start_next(home)
    assert run_page(home, "tickets")["log"] == ["packs: --rank: is wrong."]


def test_a_run_may_be_resumed_before_its_process_has_ended(home, program):
    program(
        "import time; from pathlib import Path\nwhile not Path('end').exists(): time.sleep(0.01)"
    )
    folder = make_run(home, checkpoint=10)
    jobs.resume(home, "tickets")
    (folder / "waiting.json").unlink()  # as its process does
    program(TRAINS)
    jobs.resume(home, "tickets")
    (home / "end").touch()
    until(lambda: started(home) == ["tickets-run"])


def test_the_command_has_only_what_was_specified(home):
    (home / "data").mkdir()
    (home / "data" / "a.jsonl").touch()
    settings = {"data": "data/a.jsonl", "rank": "8", "iters": ""}
    arguments = jobs.arguments_of(home, "tickets", settings)
    assert arguments == ["train", "--data=data/a.jsonl", "--rank=8", "--out=packs/tickets"]


@pytest.mark.parametrize(
    "settings",
    [
        {"trust_remote_code": "yes"},
        {"allow_urls": "yes"},
        {"report_to": "wandb"},
        {"overwrite": "yes"},
        {"metric": "data/evil.py:f"},
        {"config": "evil.yaml"},
        {"rank": ["8"]},
        {"model": "tiny\n--trust-remote-code"},
        {"data": "/etc/passwd"},
        {"data": "data/../../etc"},
        {"data": "data"},
        {"data": "data/link"},
        {"resume": "yes"},
    ],
)
def test_a_waiting_run_of_a_stranger_starts_nothing_else(home, program, settings):
    program(TRAINS)
    (home / "end").touch()
    (home / "data").mkdir()
    (home / "data" / "link").symlink_to("/etc/passwd")
    wait(home, "evil", **settings)
    jobs.start_next(home)
    assert runs_of(home)[0][0].state == "failed"
    with pytest.raises(PackError):
        jobs.queue(home, "other", settings)
    assert started(home) == [] and not run_folder(home / "packs" / "other").exists()


@pytest.mark.parametrize("content", ["[", "[]", '{"settings": []}', "{}"])
def test_a_damaged_waiting_run_does_not_stop_the_queue(home, program, content):
    program(TRAINS)
    (home / "end").touch()
    wait(home, "damaged")
    (home / "packs" / "damaged-run" / "waiting.json").write_text(content)
    jobs.queue(home, "tickets", {})
    until(lambda: started(home) == ["tickets-run"])
    assert "waiting.json" in run_page(home, "damaged")["run"].error


def test_what_is_no_file_of_a_run_is_not_written(home, program):
    program(TRAINS)
    (home / "outside").write_text("mine")
    for name in ("link", "pipe"):
        wait(home, name)
    (home / "packs" / "link-run" / "log.txt").symlink_to(home / "outside")
    os.mkfifo(home / "packs" / "pipe-run" / "log.txt")
    jobs.start_next(home)
    assert started(home) == [] and (home / "outside").read_text() == "mine"


@pytest.mark.parametrize(
    "setting", ["trust_remote_code", "allow_urls", "report_to", "reward", "metric"]
)
def test_a_run_with_settings_of_a_terminal_is_resumed_there(home, program, setting):
    program(TRAINS)
    folder = make_run(home, checkpoint=10)
    identity = {"recipe": {**RECIPE, setting: "a.py:f"}, "base": "b" * 64, "data": {}}
    RunFolder(folder).write_identity(identity)
    with pytest.raises(PackError, match="in a terminal"):
        jobs.resume(home, "tickets")
    wait(home, "tickets", resume="yes")
    jobs.start_next(home)
    assert started(home) == []


def test_only_the_process_of_a_run_is_stopped(home):
    with subprocess.Popen(["sleep", "60"]) as stranger:
        here = {"process": stranger.pid, "started": start_of(stranger.pid)}
        folder = make_run(home, **here)
        with pytest.raises(PackError, match="does not run"):  # nobody holds the lock
            jobs.stop(home, "tickets")
        with exclusive_writer(folder):
            (folder / "status.json").write_text(json.dumps({**here, "started": "12345"}))
            with pytest.raises(PackError, match="does not run"):
                jobs.stop(home, "tickets")
            assert stranger.poll() is None

            (folder / "status.json").write_text(json.dumps(here))
            assert jobs.stop(home, "tickets") is True
            assert stranger.wait(10) < 0


@pytest.mark.parametrize("name", ["", "..", "a/b", "-x", "x" * 65, "taken"])
def test_names_that_no_run_can_have(home, name):
    (home / "packs" / "taken").mkdir()
    with pytest.raises(PackError) as caught:
        jobs.queue(home, name, {})
    assert caught.value.flag == "out" and os.listdir(home / "packs") == ["taken"]
    assert jobs.free_name(home, "taken") == "taken-2"


@pytest.mark.parametrize("batches", ["-1", "many", "1.5"])
def test_batches_that_are_no_number(home, batches):
    make_run(home, checkpoint=10)
    with pytest.raises(PackError) as caught:
        jobs.resume(home, "tickets", batches)
    assert caught.value.flag == "iters"


def packed(home, name: str):
    pack = home / "packs" / name
    pack.mkdir()
    (pack / "pack.json").write_text("{}")
    return pack


def test_a_run_is_deleted_and_its_pack_only_if_that_is_said(home):
    for name in ("first", "second"):
        (make_run(home, name, checkpoint=10) / "step-000010" / "link").symlink_to(home)
        packed(home, name)
    jobs.delete(home, "first", " first ", with_pack=False)
    assert sorted(os.listdir(home / "packs")) == ["first", "second", "second-run"]
    jobs.delete(home, "second", "second", with_pack=True)
    assert os.listdir(home / "packs") == ["first"]


@pytest.mark.parametrize(
    ("name", "typed"),
    [
        ("tickets", ""),
        ("tickets", "Tickets"),
        ("tickets", "other"),
        ("", ""),
        ("..", ".."),
        ("../outside", "../outside"),
        ("link", "link"),
        ("linked", "linked"),
        ("stranger", "stranger"),
        ("waits", "waits"),
        ("no-pack", "no-pack"),
        ("pack-is-a-link", "pack-is-a-link"),
    ],
)
def test_what_is_not_deleted(home, name, typed):
    outside = make_run(home / "elsewhere")
    for each in ("tickets", "linked", "waits", "no-pack", "pack-is-a-link"):
        make_run(home, each, checkpoint=10)
    for each in ("tickets", "linked", "waits"):
        packed(home, each)

    (home / "packs" / "pack-is-a-link").symlink_to(packed(home, "kept"))
    (home / "packs" / "link-run").symlink_to(outside)
    (home / "packs" / "linked-run" / "inner").symlink_to(outside)
    (home / "packs" / "stranger-run").mkdir()
    (home / "packs" / "stranger-run" / "diary.txt").touch()
    (home / "packs" / "waits-run" / "waiting.json").write_text("{}")

    before = sorted(home.rglob("*"))
    with pytest.raises(PackError):
        jobs.delete(home, name, typed, with_pack=True)
    assert sorted(home.rglob("*")) == before


def test_a_run_that_trains_or_whose_folder_is_elsewhere_is_not_deleted(home, tmp_path):
    with exclusive_writer(make_run(home)), pytest.raises(PackError, match="is running"):
        jobs.delete(home, "tickets", "tickets", with_pack=False)
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "packs").symlink_to(home / "packs")
    with pytest.raises(PackError, match="only packs and runs"):
        jobs.delete(linked, "tickets", "tickets", with_pack=False)
    assert (home / "packs" / "tickets-run").is_dir()
