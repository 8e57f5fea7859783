"""Measurements of a device: found again by what they depend on. Files: tests/test_cache.py."""

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
