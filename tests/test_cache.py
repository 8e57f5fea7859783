"""The user's cache: what comes back is what was stored, or nothing."""

import json
import os
import time

import numpy as np
import pytest

from mlx_packs.cache import Cache, read_arrays, write_arrays
from mlx_packs.files import CACHE_VARIABLE

ARRAYS = {
    "target": np.arange(6) % 2 == 1,
    "ends": np.array([3, 6]),
    "counts": np.array([1, 2], np.int32),
    "tokens": np.arange(6, dtype=np.int32).reshape(3, 2),
}
WIDE_FIRST = ["ends", "counts", "tokens", "target"]


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "things"


CACHE = Cache("things", days=30)


@pytest.mark.parametrize("count", [0, 2])
def test_a_file_is_one_npy_after_another(tmp_path, count):
    arrays = {name: array[:count] for name, array in ARRAYS.items()}
    write_arrays(tmp_path / "x.npy", "key", arrays)
    with (tmp_path / "x.npy").open("rb") as file:
        names = json.loads(np.load(file).tobytes())
        plain = {name: np.load(file) for name in names}
    mapped = read_arrays(tmp_path / "x.npy", "key")
    assert list(mapped) == list(plain) == WIDE_FIRST
    for name, array in arrays.items():
        assert mapped[name].dtype == plain[name].dtype == array.dtype
        assert mapped[name].flags.aligned
        assert mapped[name].tolist() == plain[name].tolist() == array.tolist()
    assert read_arrays(tmp_path / "x.npy", "another key") is None


def test_a_file_with_any_fault_is_not_read(tmp_path):
    file = tmp_path / "x.npy"
    write_arrays(file, "key", ARRAYS)
    whole = file.read_bytes()
    flipped = [
        whole[:i] + bytes([whole[i] ^ 1 << i % 8]) + whole[i + 1 :] for i in range(len(whole))
    ]
    for damaged in (*flipped, *(whole[:n] for n in range(len(whole))), whole + b"\0"):
        file.unlink()  # not in place: a mapping may be left
        file.write_bytes(damaged)
        assert read_arrays(file, "key") is None


@pytest.mark.parametrize("content", [b"", b"[]", b'{"format": 1}', b"[" * 100_000])
def test_a_damaged_entry_is_missing_and_replaced(path, content):
    assert CACHE.get_json("k") is None and CACHE.put_json("k", {"a": 1})
    (file,) = path.iterdir()
    file.unlink()
    file.write_bytes(content)
    assert CACHE.get_json("k") is None
    assert CACHE.put_json("k", {"a": 1}) and CACHE.get_json("k") == {"a": 1}


def test_a_cache_that_is_off_or_cannot_be_written_stores_nothing(path, monkeypatch):
    path.parent.write_text("a file")
    assert not CACHE.put("k", ARRAYS) and CACHE.get("k") is None
    monkeypatch.setenv(CACHE_VARIABLE, "off")
    assert not CACHE.put("k", ARRAYS) and CACHE.get("k") is None and CACHE.path is None
    needed = Cache("things", days=30, is_needed=True)
    assert needed.put_json("k", [1]) and needed.get_json("k") == [1]


def test_a_folder_is_written_once_a_key_and_is_complete_or_missing(path):
    def write(text):
        def into(folder):
            (folder / "text").write_text(text)

        return into

    def fail(folder):
        (folder / "text").write_text("half")
        raise ValueError

    with pytest.raises(ValueError):
        CACHE.folder("f", "1", fail)
    assert not list(path.iterdir())
    folder = CACHE.folder("f", "1", write("one"))
    assert CACHE.folder("f", "1", fail) == folder == path / "f"
    assert CACHE.folder("f", "2", write("two")) == folder
    assert (folder / "text").read_text() == "two" and list(path.iterdir()) == [folder]


def test_what_nobody_has_used_is_removed(path):
    for key in ("a", "b"):
        CACHE.put_json(key, 1)
        CACHE.folder(f"folder-{key}", key, lambda folder: None)
    (path / "of-an-earlier-version").mkdir()
    for entry in (*path.glob("*/.key"), *path.iterdir()):
        os.utime(entry, (1e9, 1e9))
    assert CACHE.get_json("a") == 1
    CACHE.folder("folder-a", "a", lambda folder: pytest.fail("written again"))
    CACHE.remove_unused()
    assert {entry.name for entry in path.iterdir()} == {"a.npy", "folder-a"}


def test_a_clock_that_is_set_back_removes_nothing(path, monkeypatch):
    for key in ("used", "older"):
        CACHE.put_json(key, 1)
    day = 24 * 3600
    now = time.time()
    os.utime(path / "older.npy", (now - 40 * day, now - 40 * day))
    monkeypatch.setattr(time, "time", lambda: now - 365 * day)
    CACHE.remove_unused()
    assert len(list(path.iterdir())) == 2
    monkeypatch.setattr(time, "time", lambda: now)
    CACHE.remove_unused()
    assert [file.name for file in path.iterdir()] == ["used.npy"]
