"""Homes that are large, cannot be written, or are on a full disk; a clock that goes back."""

import ctypes
import mmap
import os
import resource
import shutil
import socket
import time

import pytest

from mlx_packs.files import exclusive_writer
from mlx_packs.studio import runs
from mlx_packs.studio.jobs import training
from mlx_packs.studio.runs import live, report_page, run_page, runs_of
from mlx_packs.training.status import read_status
from tests.helpers.run_folders import losses, make_run
from tests.helpers.serving import until
from tests.helpers.studio import studio

SMALL = 300_000  # bytes: of a disk that is nearly full


def test_a_clock_that_goes_back_leaves_times_as_they_were(home):
    status = {"phase": "Training", "batch": 240, "batches": 600, "seconds_left": 730.0}
    folder = make_run(home, **status, updated=time.time() + 3600)
    os.utime(folder, (time.time() + 3600,) * 2)
    with exclusive_writer(folder):
        (run,) = runs_of(home)[0]
    assert run.progress == "Batch 240 of 600, 12 minutes left" and run.age == "0 seconds ago"


@pytest.mark.slow
def test_of_10_000_runs_the_newest_are_read(home, studio, monkeypatch):
    for number in range(10_000):
        (home / "packs" / f".n{number}-run.lock").touch()
        if number < 9_700:
            (home / "packs" / f"n{number}-run").mkdir()
        else:
            make_run(home, f"n{number}", losses(*range(10, 600, 10)), batch=600, batches=600)

    signed, read = studio.sign_in(), []
    monkeypatch.setattr(
        runs, "read_status", lambda folder: read.append(folder) or read_status(folder)
    )
    for path in ("/", "/states"):
        read.clear()
        content = studio.request("GET", path, headers=signed)[2]
        assert len(read) == 200 and (path != "/" or b"9,800 older runs" in content)
    assert not training(home)


@pytest.mark.slow
def test_the_end_of_a_gigabyte_of_metrics_is_shown(home):
    folder = make_run(home, metrics=losses(10))
    with (folder / "metrics.jsonl").open("r+b") as file:
        file.seek(1 << 30)
        file.write(b'\n{"batch": 20, "loss": 1.5}\n')
    first = live(home, "tickets", "", 0)
    assert first["series"] == {"loss": [[20], [1.5]]} and first["next"] > 1 << 30
    assert ("20", "1.5", "–") in run_page(home, "tickets")["points"]
    assert "tickets" in report_page(home, "tickets")


def obey_permissions() -> None:
    """Take from root, if that is the user, the right to write everywhere."""
    drop_capability, dac_override = 24, 1
    ctypes.CDLL(None).prctl(drop_capability, dac_override, 0, 0, 0)


@pytest.mark.slow
def test_a_home_without_write_access_shows_runs_and_starts_none(home):
    make_run(home, metrics=losses(10, 20), checkpoint=20, batch=20, batches=600)
    before = sorted(home.rglob("*"))
    for path in (home, *before):
        path.chmod(0o555)

    with studio(home, None, obey_permissions) as running:
        assert "tickets" in running.request("GET", "/")[2]
        for path, body in (
            ("/example", None),
            ("/runs/tickets/resume", None),
            ("/upload?name=a.csv", b"a,b"),
        ):
            status, _, text = running.request("POST", path, body)
            print(path, status, text[-300:])
            assert status == 507 and "cannot be written (Permission denied)" in text

    assert sorted(home.rglob("*")) == before
    for path in (home, home / "packs"):
        path.chmod(0o755)


def full_disk() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL, SMALL))


@pytest.mark.slow
def test_a_full_disk_costs_an_upload_and_a_run_nothing_else(home):
    with studio(home, None, full_disk) as running:
        status, _, text = running.request("POST", "/upload?name=a.csv", bytes(2 * SMALL))
        print(text)
        assert status == 507 and "cannot be written (File too large)" in text
        assert not list((home / "data").iterdir())

        small = {"model": "tiny", "data": "tiny", "iters": "4", "name": "small"}
        assert running.request("POST", "/new", **small)[0] == 303
        run = home / "packs" / "small-run"
        until(lambda: read_status(run).state == "failed", 300)
        error = read_status(run).error
        print("the run:", error)
        assert "cannot be written" in error and error in running.request("GET", "/runs/small")[2]
        assert not list(run.glob("step-*")) and not (home / "packs" / "small").exists()


@pytest.mark.slow
def test_an_upload_of_200_mb_takes_little_memory(home, tmp_path):
    with (tmp_path / "large.csv").open("w+b") as file, studio(home) as running:
        file.truncate(200 << 20)
        running.request("GET", "/new")
        before = running.status("VmRSS") / 1e3
        with (
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
            memoryview(content) as view,
        ):
            assert running.request("POST", "/upload?name=large.csv", view)[0] == 200
        peak = running.status("VmHWM") / 1e3
        print(f"server before {before:.0f} MB, peak {peak:.0f} MB")
        assert (home / "data" / "large.csv").stat().st_size == 200 << 20 and peak < 60

        with socket.create_connection(("127.0.0.1", running.port)) as connection:
            head = f"POST /upload?name=cut.csv HTTP/1.1\r\nHost: 127.0.0.1:{running.port}\r\n"
            head += f"Origin: http://127.0.0.1:{running.port}\r\nContent-Length: {200 << 20}\r\n"
            head += f"Cookie: {running.cookie['Cookie']}\r\n\r\n"
            connection.sendall(head.encode() + bytes(8 << 20))
            until(lambda: len(list((home / "data").iterdir())) == 2)
        until(lambda: [file.name for file in (home / "data").iterdir()] == ["large.csv"])
    shutil.rmtree(home / "data")
