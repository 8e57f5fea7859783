"""Measurements of a device: found again by what they depend on, and never in the way."""

import multiprocessing
import os

import pytest

from mlx_packs import measurements, runtime
from mlx_packs.cpu.blas import Blas
from mlx_packs.files import CACHE_VARIABLE
from mlx_packs.measurements import recall, remember

OF = {"shapes": [(64, 32), (8, 64)], "rows": 128, "dtype": "float32"}
RESULT = {"dense": 0.5, "quantized": 1.25}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "measurements"


def test_a_measurement_is_found_by_kind_and_subject(folder):
    assert recall("speed", OF) is None
    remember("speed", OF, RESULT)
    assert recall("speed", OF) == RESULT
    assert recall("speed", dict(reversed(OF.items()))) == RESULT
    for other in ({"rows": 129}, {"dtype": "bfloat16"}, {"shapes": [(64, 32)]}, {"more": 1}):
        assert recall("speed", OF | other) is None
    assert recall("rates", OF) is None
    remember("speed", OF, {"dense": 2.0})
    assert recall("speed", OF) == {"dense": 2.0}


def test_another_machine_or_version_has_none(folder, monkeypatch):
    remember("speed", OF, RESULT)

    for owner, name, value in (
        (runtime, "device_name", lambda: "Apple M9 (metal)"),
        (os, "cpu_count", lambda: 96),
        (runtime, "total_memory", lambda: 1 << 40),
        (measurements.mx, "__version__", "9.9"),
        (measurements, "__version__", "9.9"),
        (runtime, "BLAS", Blas("another", True, "", 7)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            assert recall("speed", OF) is None, name
            remember("speed", OF, {"dense": 9.0})
        assert recall("speed", OF) == RESULT, name


def test_a_damaged_file_is_ignored_and_replaced(folder):
    remember("speed", OF, RESULT)
    (file,) = folder.iterdir()
    content = file.read_bytes()
    for damaged in (b"", content[: len(content) // 2], b"[1, 2]", b'{"format": 1, "result": {}}'):
        file.unlink()
        file.write_bytes(damaged)
        assert recall("speed", OF) is None, damaged
        remember("speed", OF, RESULT)
        assert recall("speed", OF) == RESULT and list(folder.iterdir()) == [file]


def test_without_a_cache_nothing_is_kept(folder, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, "off")
    remember("speed", OF, RESULT)
    assert recall("speed", OF) is None and not folder.exists()


def test_a_folder_that_cannot_be_written_is_no_error(folder):
    folder.parent.mkdir()
    folder.write_text("a file")
    remember("speed", OF, RESULT)
    assert recall("speed", OF) is None and folder.read_text() == "a file"


def _remember_often(number: int) -> None:
    for _ in range(50):
        remember("speed", OF, {"dense": float(number), "quantized": float(number)})


def test_processes_that_write_at_once_leave_one_whole_file(folder, monkeypatch):
    known = measurements.device()
    monkeypatch.setattr(measurements, "device", lambda: known)  # forks must not ask a GPU
    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=_remember_often, args=(number,)) for number in range(3)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        result = recall("speed", OF)
        assert result is None or result["dense"] == result["quantized"]
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert recall("speed", OF)["dense"] in (0.0, 1.0, 2.0)
    assert len(list(folder.iterdir())) == 1


def test_what_no_run_has_used_for_months_is_removed(folder):
    remember("speed", OF, RESULT)
    (old,) = folder.iterdir()
    os.utime(old, (1e9, 1e9))
    remember("speed", OF | {"rows": 5}, RESULT)
    assert recall("speed", OF) is None and recall("speed", OF | {"rows": 5}) == RESULT
