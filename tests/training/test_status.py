"""status.json of a run folder: what a run is doing, how it ended, and what its folder says."""

import errno
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlx_packs import train_pack
from mlx_packs.errors import PackError, RunStopped
from mlx_packs.files import exclusive_writer
from mlx_packs.sandbox.process import start_of
from mlx_packs.training import run, status
from mlx_packs.training.status import RunStatus, Status, read_status
from tests.helpers.errors import raises
from tests.helpers.observers import observe
from tests.helpers.rows import write_rows
from tests.helpers.runs import LORA, TRAIN
from tests.training.conftest import ROWS, files_of, interrupt_at

RUN = Path("p-run")
FOUR = replace(TRAIN, iters=4)


@pytest.fixture
def written(monkeypatch) -> list[RunStatus]:
    """What a reader of the file sees after each time that it is written, which each batch does."""
    seen = []
    write = Status.write

    def writing(self):
        write(self)
        seen.append(read_status(RUN))

    monkeypatch.setattr(status, "_EVERY_S", 0.0)
    monkeypatch.setattr(Status, "write", writing)
    return seen


def test_a_run_says_what_it_is_doing_from_its_first_second(small_folder, here, written):
    write_rows(here / "d", train=ROWS, valid=ROWS[:1])
    train_pack(small_folder, "d", LORA, FOUR, "p", progress=False)
    phases = [each.phase for each in written]
    changes = [b for a, b in zip(["", *phases], phases, strict=False) if b != a]
    evaluated = ["Evaluating the held-out examples", "Writing the result"]
    assert changes == [
        *("Preparing the run", "Reading the model", "Preparing the run", "Reading the examples"),
        *("Preparing the run", "Training", "Writing the result"),
        *(2 * evaluated),  # with the pack and without
        "",
    ]
    *during, end = written
    assert all(each.state == "training" and each.process == os.getpid() for each in written)
    assert all(each.is_alive and each.reason == "" for each in during)
    batches = [each for each in during if each.phase == "Training"]
    assert [each.batch for each in batches] == [0, 1, 2, 3, 4]
    assert {each.batches for each in batches} == {4}
    assert [each.seconds_left is None for each in batches] == [True, True, False, False, False]
    assert batches[2].seconds_left > 0 and batches[-1].seconds_left == 0
    assert batches[-1].peak_gb > 0
    assert (end.reason, end.exit_code, end.error, end.batch) == ("finished", 0, "", 4)
    assert read_status(RUN).state == "finished"


def test_batches_are_written_once_a_second(tmp_path, monkeypatch):
    now = 100.0
    monkeypatch.setattr(status.time, "monotonic", lambda: now)
    writer = Status(tmp_path)
    seen = []
    for batch in range(1, 31):
        writer.on_step({"batch": batch, "peak_gb": 1.0})
        seen.append(read_status(tmp_path).batch)
        now += 0.3
    assert list(dict.fromkeys(seen)) == [1, 5, 9, 13, 17, 21, 25, 29]
    assert os.listdir(tmp_path) == ["status.json"]


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EACCES, errno.ENOENT])
def test_a_file_that_cannot_be_written_changes_nothing(train, monkeypatch, fault):
    whole = files_of(train("whole").run)
    write_text = Path.write_text

    def text(path, *args, **options):
        if "status.json" in path.name:
            path.touch()
            raise OSError(fault, os.strerror(fault), str(path))
        return write_text(path, *args, **options)

    monkeypatch.setattr(Path, "write_text", text)
    run = train().run
    assert files_of(run) == whole
    assert not [path.name for path in run.iterdir() if "status" in path.name]
    assert read_status(run).reason == ""


ERRORS = [
    (ZeroDivisionError("no"), "crashed", 70, "ZeroDivisionError: no"),
    (RuntimeError("[malloc] too much"), "memory", 2, "--batch-size"),
    (OSError(errno.ENOSPC, "No space left", "a"), "unwritable", 2, "a: No space left"),
    (PackError("--rank: is odd\x1b[2J."), "invalid", 2, "--rank: is odd?[2J."),
    (KeyboardInterrupt(), "interrupted", 130, "interrupted"),
]


@pytest.mark.parametrize(("error", "reason", "code", "text"), ERRORS)
def test_the_error_that_ended_a_run_is_recorded(train, monkeypatch, error, reason, code, text):
    def fail(line):
        if line["batch"] == 2:
            raise error

    observe(monkeypatch, on_step=fail)
    with pytest.raises((type(error), RunStopped)):
        train(iters=3, save_every=100)
    end = read_status(RUN)
    assert (end.state, end.reason, end.exit_code, end.batch) == ("failed", reason, code, 2)
    assert text in end.error and not end.is_alive or end.process == os.getpid()
    assert end.flag == ("rank" if reason == "invalid" else "")


def test_a_run_that_diverged_names_the_setting(train):
    with raises("diverged", "learning_rate"):
        train(iters=9, learning_rate=1e30, max_grad_norm=0, optimizer="sgd", save_every=100)
    end = read_status(RUN)
    assert (end.state, end.reason, end.flag) == ("failed", "diverged", "learning_rate")


def test_an_interrupted_run_is_stopped_until_it_is_resumed(train, monkeypatch, written):
    with monkeypatch.context() as patch:
        interrupt_at(patch, 2)
        with pytest.raises(RunStopped):
            train(iters=4, save_every=100)
    end = read_status(RUN)
    assert (end.state, end.reason, end.exit_code) == ("stopped", "interrupted", 143)
    assert str(RUN / "step-000002") in end.error
    written.clear()
    train(iters=4, resume=True)
    assert written[0].state == "training" and not written[0].reason  # not that of the first time
    assert [each.batch for each in written if each.phase == "Training"] == [2, 3, 4]


def test_a_failed_gate_is_the_exit_code_of_a_finished_run(train):
    train(max_pack_mb=1e-6)
    assert (read_status(RUN).state, read_status(RUN).exit_code) == ("finished", 1)


@pytest.mark.parametrize("file", ["log.txt", "waiting.json", "status.json"])
def test_a_run_that_has_not_begun_keeps_its_folder(train, file):
    RUN.mkdir()
    (RUN / file).write_text("{}")
    with raises("not-found", "data"):
        train(data="nowhere")
    end = read_status(RUN)
    if file == "status.json":  # nobody but the run that failed has written there
        assert not RUN.exists()
    else:
        assert (end.state, end.reason, end.flag) == ("failed", "not-found", "data")
        assert (RUN / "log.txt").exists() == (file == "log.txt")
    train()
    assert read_status(RUN).state == "finished" and not (RUN / "waiting.json").exists()


def test_other_files_are_of_no_run(train):
    RUN.mkdir()
    for name in ("log.txt", "notes.txt"):
        (RUN / name).write_text("mine")
    with raises("exists", None, "p-run"):
        train()
    assert sorted(path.name for path in RUN.iterdir()) == ["log.txt", "notes.txt"]


def test_resume_makes_no_folder(train):
    with raises("not-found", "resume", "is no run"):
        train(resume=True)
    assert not RUN.exists()


def test_other_ranks_write_no_status(train, monkeypatch):
    monkeypatch.setattr(run, "group", lambda: SimpleNamespace(is_first=False))
    train(iters=1)
    assert not (RUN / "status.json").exists()


ENDED = {"reason": "diverged", "exit_code": 2, "error": "nan"}
STOPPED = {"reason": "interrupted", "exit_code": 143, "error": "interrupted"}


@pytest.mark.parametrize(
    ("files", "ended", "state"),
    [
        ((), None, "failed"),  # it was killed before its first checkpoint
        (("log.txt",), None, "failed"),
        (("step-000002/x",), None, "stopped"),
        (("step-000002/x",), STOPPED, "stopped"),
        ((), STOPPED, "failed"),
        (("step-000002/x",), ENDED, "failed"),
        (("step-000002/x", "report.json"), None, "finished"),
        (("step-000002/x", "report.json"), ENDED, "finished"),  # of another command, since
        (("step-000002/x",), {"reason": "finished", "exit_code": 0}, "finished"),
        (("waiting.json",), None, "waiting"),
        (("step-000002/x", "report.json", "waiting.json"), ENDED, "waiting"),
    ],
)
def test_the_state_of_a_run_is_in_its_folder(tmp_path, files, ended, state):
    run = tmp_path / "a-run"
    run.mkdir()
    for name in files:
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).touch()
    (run / "status.json").write_text(json.dumps({"process": 1, "ended": ended}))
    assert read_status(run).state == state
    assert read_status(run).error == (ended or {}).get("error", "")
    with exclusive_writer(run):
        assert read_status(run).state == "training"
    assert read_status(run).state == state


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "{", '{"process": true, "batch": NaN, "ended": []}', "\x00", "[" * 10_000),
        '{"process": "1", "batch": 1e400, "phase": 3, "ended": {"reason": {}, "error": null}}',
        '{"phase": "' + 100_000 * "x" + '"}',
    ],
)
def test_a_damaged_file_says_nothing(tmp_path, content):
    (tmp_path / "status.json").write_text(content)
    read = read_status(tmp_path)
    numbers = (read.process, read.batch, read.batches, read.seconds_left, read.exit_code)
    assert numbers == (None,) * 5 and not (read.phase or read.reason or read.error)
    assert (read.state, read.is_alive) == ("failed", False)


def test_a_link_or_a_folder_in_its_place_is_not_read(tmp_path):
    (tmp_path / "status.json").mkdir()
    os.mkfifo(tmp_path / ".a-run.lock")
    assert read_status(tmp_path).state == "failed"
    assert read_status(tmp_path / "a-run").state == "failed"


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_a_process_is_told_apart_by_its_start(platform, monkeypatch):
    monkeypatch.setattr(sys, "platform", platform)
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = start_of(process.pid)
    assert started and started == start_of(process.pid)
    process.communicate(b"\n")
    assert start_of(process.pid) == ""
