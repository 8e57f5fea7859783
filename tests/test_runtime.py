"""Limits of memory: wired, cached, and what the device has in total."""

import pytest

from mlx_packs import runtime
from mlx_packs.memory.plan import ERROR
from mlx_packs.runtime import mx


def stand_in_for_metal(monkeypatch) -> list[int]:
    """Wired limits in the order in which they are set, on a Mac that recommends 1000 bytes."""
    wired = [0]

    def set_wired_limit(limit):
        wired.append(limit)
        return wired[-2]

    monkeypatch.setattr(runtime, "on_cpu", lambda: False)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "set_wired_limit", set_wired_limit)
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 1000})
    return wired


def test_memory_limits_wire_memory_on_the_gpu_of_a_mac_until_the_run_ends(monkeypatch):
    wired = stand_in_for_metal(monkeypatch)
    with runtime.memory_limits():
        assert wired == [0, 1000]
    assert wired == [0, 1000, 0]
    with pytest.raises(KeyboardInterrupt), runtime.memory_limits():
        raise KeyboardInterrupt
    assert wired == [0, 1000, 0, 1000, 0]
    monkeypatch.setattr(runtime, "on_cpu", lambda: True)
    with runtime.memory_limits():
        assert wired == [0, 1000, 0, 1000, 0]


def test_memory_limits_restore_the_cache_limit_when_wiring_fails(monkeypatch):
    stand_in_for_metal(monkeypatch)

    def reject(_):
        raise ValueError("rejected")

    monkeypatch.setattr(mx, "set_wired_limit", reject)
    before = mx.set_cache_limit(5 << 20)
    try:
        with pytest.raises(ValueError, match="rejected"), runtime.memory_limits():
            pass
        assert mx.set_cache_limit(before) == 5 << 20
    finally:
        mx.set_cache_limit(before)


@pytest.mark.parametrize(
    ("on_cpu", "info", "total"),
    [
        (False, {"max_recommended_working_set_size": 1000}, 1000),
        (False, {"total_memory": 2000}, 2000),
        (True, {"total_memory": 2000}, 1024),
    ],
)
def test_total_memory_is_that_of_the_device(monkeypatch, tmp_path, on_cpu, info, total):
    files = [tmp_path / name for name in ("none", "max", "1024")]
    for file in files[1:]:
        file.write_text(f"{file.name}\n")
    monkeypatch.setattr(runtime, "_MEMORY_LIMITS", files)
    monkeypatch.setattr(runtime, "on_cpu", lambda: on_cpu)
    monkeypatch.setattr(mx, "device_info", lambda: info)
    assert runtime.total_memory() == total


def test_cache_limit_on_a_gpu_is_less_than_a_plan_leaves_free(monkeypatch):
    monkeypatch.setattr(runtime, "on_cpu", lambda: False)
    monkeypatch.setattr(runtime, "total_memory", lambda: 8 << 30)
    assert runtime.cache_limit() == 1 << 30
    assert runtime.cache_limit() < (1 - 1 / (1 + ERROR)) * (8 << 30)
