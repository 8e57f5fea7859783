"""Atomic folders and files: replaced at once, durable, and what dead processes leave is cleaned up."""

import ctypes
import errno
import fcntl
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlx_packs import filesystem
from mlx_packs.files import atomic_folder, atomic_write, exclusive_writer
from mlx_packs.filesystem import OLD, PARTIAL, hidden_name, sweep, temporary
from tests.helpers.errors import raises

DAYS_AGO = time.time() - 2 * 24 * 3600


@pytest.fixture(params=[True, False], ids=["exchange", "two renames"])
def both_ways(request, monkeypatch) -> None:
    """Folders are replaced by an exchange of names, and as where that does not exist."""
    if not request.param:
        monkeypatch.setattr(filesystem, "exchange", lambda *_: False)


def write(folder: Path, text: str) -> Path:
    with atomic_folder(folder, replace=True) as partial:
        (partial / "inner").mkdir()
        (partial / "inner" / "file").write_text(text)
    return folder


def text_of(folder: Path) -> str:
    return (folder / "inner" / "file").read_text()


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_names_of_folders_are_exchanged_at_once(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    assert filesystem.exchange(tmp_path / "a", tmp_path / "b")
    assert (names(tmp_path / "a"), names(tmp_path / "b")) == (["b"], ["a"])
    with pytest.raises(FileNotFoundError):
        filesystem.exchange(tmp_path / "a", tmp_path / "c")


@pytest.mark.parametrize("platform", ["darwin", "linux"])
def test_exchange_asks_the_system_and_believes_its_errors(platform, monkeypatch):
    calls, code = [], 0

    def call(*args):
        calls.append(args)
        ctypes.set_errno(code)
        return -1 if code else 0

    library = SimpleNamespace(renamex_np=call, renameat2=call)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: library)
    assert filesystem.exchange(Path("a"), Path("b"))
    expected = (b"a", b"b", 2) if platform == "darwin" else (-100, b"a", -100, b"b", 2)
    assert calls == [expected]
    for code in (errno.ENOTSUP, errno.EINVAL, errno.ENOSYS):  # noqa: B007 - read by `call`
        assert not filesystem.exchange(Path("a"), Path("b"))
    code = errno.EACCES
    with pytest.raises(PermissionError):
        filesystem.exchange(Path("a"), Path("b"))
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace())
    assert not filesystem.exchange(Path("a"), Path("b"))  # a system library without the call


def test_files_are_synced_before_a_rename_and_folders_after(tmp_path, both_ways, monkeypatch):
    write(tmp_path / "x", "old")
    events, sync, rename = [], filesystem.sync, os.rename
    exchange = filesystem.exchange

    def synced(path, **options):
        events.append(("sync", path.name))
        sync(path, **options)

    def renamed(source, target):
        events.append(("rename", Path(target).name))
        rename(source, target)

    def exchanged(one, other):
        events.append(("rename", other.name))
        return exchange(one, other)

    monkeypatch.setattr(filesystem, "sync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    monkeypatch.setattr(filesystem, "exchange", exchanged)
    write(tmp_path / "x", "new")
    at = max(i for i, event in enumerate(events) if event == ("rename", "x"))
    before = [name for kind, name in events[:at] if kind == "sync"]
    assert before[-1] == "file" and "inner" in before and ".partial-" in before[0]
    assert events[at + 1] == ("sync", tmp_path.name)
    assert events[at + 2][0] == "rename"  # the old folder goes once the new one is durable


def test_macos_empties_the_cache_of_the_drive(tmp_path, monkeypatch):
    full, plain = [], []
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", lambda _, command: full.append(command) or 0)
    monkeypatch.setattr(os, "fsync", plain.append)
    write(tmp_path / "x", "1")
    # once after all files of the folder, once for its name
    assert full == [51, 51] and len(plain) == 2

    def fails(*_):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "fcntl", fails)
    write(tmp_path / "y", "1")
    assert len(full) == 2 and len(plain) == 6


def test_only_what_nobody_holds_is_removed(tmp_path):
    dead = hidden_name(tmp_path / "x", PARTIAL)
    dead.mkdir()
    (dead / "file").touch()
    with (
        temporary(tmp_path / "x", Path.mkdir) as folder,
        temporary(tmp_path / "x", Path.touch) as file,
    ):
        assert not dead.exists()
        sweep(tmp_path)
        assert folder.is_dir() and file.is_file()
    assert names(tmp_path) == []


def test_what_a_dead_process_left_is_removed_by_the_next(tmp_path):
    """Of every file that the next one writes in that folder, whatever its name."""
    code = (
        "import os, sys, pathlib; from mlx_packs.files import *; from mlx_packs.filesystem import *\n"
        "here = pathlib.Path(sys.argv[1]); lock = exclusive_writer(here / 'x'); lock.__enter__()\n"
        "x = temporary(here / 'x', pathlib.Path.mkdir); x.__enter__().joinpath('file').touch()\n"
        "y = temporary(here / 'y', pathlib.Path.touch); y.__enter__()\n"
        "os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert len(names(tmp_path)) == 3
    with exclusive_writer(tmp_path / "z"):
        assert names(tmp_path) == [".z.lock"]
    assert names(tmp_path) == []


@pytest.mark.parametrize("why", ["another host", "no locks"])
def test_what_cannot_be_known_to_be_dead_waits_a_day(tmp_path, monkeypatch, why):
    if why == "no locks":
        monkeypatch.setattr(filesystem, "lock", lambda _: False)
        partial = hidden_name(tmp_path / "x", PARTIAL)
    else:
        partial = tmp_path / ".x.partial-000000-0123456789"
    partial.mkdir()
    (partial / "file").touch()
    os.utime(partial, (DAYS_AGO, DAYS_AGO))
    sweep(tmp_path)
    assert partial.exists()  # its file was written now
    os.utime(partial / "file", (DAYS_AGO, DAYS_AGO))
    sweep(tmp_path)
    assert not partial.exists()


def test_a_folder_that_was_moved_away_stays(tmp_path):
    """A process was killed between two renames; the user renames it."""
    write(tmp_path / "x", "old")
    old = hidden_name(tmp_path / "x", OLD)
    os.rename(tmp_path / "x", old)
    sweep(tmp_path)
    assert text_of(old) == "old"


def test_what_was_moved_away_is_removed_once_the_folder_is_replaced(tmp_path):
    old = write(hidden_name(tmp_path / "x", OLD), "of a process that was killed after two renames")
    other = write(hidden_name(tmp_path / "xy", OLD), "of another folder")
    write(tmp_path / "x", "its result")  # where nothing was replaced
    assert old.exists()
    write(tmp_path / "x", "new")
    assert text_of(tmp_path / "x") == "new" and not old.exists() and other.exists()


def test_lock_files_of_others_stay(tmp_path):
    (tmp_path / ".theirs.lock").write_text("4711\n")
    (tmp_path / ".empty.lock").touch()
    (tmp_path / ".dead.lock").write_bytes(filesystem.lock_text())
    with exclusive_writer(tmp_path / "live"):
        sweep(tmp_path)
        assert names(tmp_path) == [".empty.lock", ".live.lock", ".theirs.lock"]
        with raises("busy", None, "live"), exclusive_writer(tmp_path / "live"):
            pass


def _write_often(folder: Path, text: str) -> None:
    for _ in range(20):
        write(folder, text)
        atomic_write(folder.parent / "file", text)


def test_two_writers_at_once_leave_one_whole_folder(tmp_path, both_ways):
    write(tmp_path / "x", "old")
    threads = [threading.Thread(target=_write_often, args=(tmp_path / "x", t)) for t in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert text_of(tmp_path / "x") in "ab" and (tmp_path / "file").read_text() in "ab"
    sweep(tmp_path)
    assert names(tmp_path) == ["file", "x"]


def test_a_writer_that_is_overtaken_between_two_renames_leaves_no_old_folder(tmp_path, monkeypatch):
    write(tmp_path / "x", "old")
    monkeypatch.setattr(filesystem, "exchange", lambda *_: False)
    rename = os.rename

    def let_another_be_faster(source, target):
        rename(source, target)
        if f".{OLD}-" in str(target):
            monkeypatch.setattr(os, "rename", rename)
            write(tmp_path / "x", "another")

    monkeypatch.setattr(os, "rename", let_another_be_faster)
    write(tmp_path / "x", "new")
    assert text_of(tmp_path / "x") == "new"
    assert names(tmp_path) == ["x"]


def test_a_replaced_folder_is_there_at_every_instant(tmp_path):
    write(tmp_path / "x", "old")
    writer = threading.Thread(target=_write_often, args=(tmp_path / "x", "new"))
    writer.start()
    looks = 0
    while writer.is_alive():
        assert os.path.isdir(tmp_path / "x")
        looks += 1
    writer.join()
    assert looks > 10


@pytest.mark.parametrize(
    ("call", "code"),
    [("mkdir", errno.EROFS), ("fsync", errno.EDQUOT), ("rename", errno.ENOSPC)],
)
def test_a_disk_that_takes_nothing_leaves_the_old_folder(tmp_path, monkeypatch, code, call):
    """Read-only, over its quota, full: one line, and the old folder."""
    write(tmp_path / "x", "old")

    def fail(*_, **__):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        patch.setattr(filesystem, "exchange", lambda *_: False)
        with raises("unwritable", None, str(tmp_path / "x"), os.strerror(code)):
            write(tmp_path / "x", "new")
    assert text_of(tmp_path / "x") == "old" and names(tmp_path) == ["x"]


def test_a_file_too_large_leaves_the_old_folder(tmp_path):
    """A limit of the system on the size of a file stands for a full disk."""
    write(tmp_path / "x", "old")
    code = (
        "import resource, sys, pathlib; from mlx_packs import files\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "with files.atomic_folder(pathlib.Path(sys.argv[1]), replace=True) as partial:\n"
        "    (partial / 'file').write_bytes(bytes(2000))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "x")]
    failed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert failed.returncode == 1 and "cannot be written (File too large)" in failed.stderr
    assert text_of(tmp_path / "x") == "old" and names(tmp_path) == ["x"]
