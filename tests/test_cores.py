"""Cores and threads on Linux: affinity, containers, and what the user chose."""

import os
import sys

import pytest

from mlx_packs import cores

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="affinity and cgroups are Linux's")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000"}, 8),
        ({"cpu.max": "250000 100000"}, 3),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "1600000 100000"}, 8),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ({"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2),
        ({"cpu.max": "nonsense"}, 8),
    ],
)
def test_cores_are_those_of_the_container(files, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(cores, "_GROUPS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert cores.usable_cores() == expected


def test_threads_are_half_of_the_cores_unless_the_user_chose_them(monkeypatch):
    monkeypatch.setattr(cores, "usable_cores", lambda: 8)
    for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(variable, raising=False)
    assert cores.blas_threads("OPENBLAS_NUM_THREADS") == 4
    monkeypatch.setattr(cores, "usable_cores", lambda: 1)
    assert cores.blas_threads("OPENBLAS_NUM_THREADS") == 1

    for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.setenv(variable, "3")
        assert cores.blas_threads("OPENBLAS_NUM_THREADS") is None
        monkeypatch.delenv(variable)
    monkeypatch.setenv("MKL_NUM_THREADS", "3")
    assert cores.blas_threads("OPENBLAS_NUM_THREADS") == 1
