"""How short memory is, by the files of Linux and the number of macOS."""

import pytest

from mlx_packs import macos
from mlx_packs.memory import pressure
from mlx_packs.memory.pressure import CRITICAL, LOW, NONE, memory_pressure

GB = 1 << 30


@pytest.fixture
def system(tmp_path, monkeypatch):
    """The files of a Linux system with 100 GB of memory, 50 of them available."""
    monkeypatch.setattr(macos, "is_macos", lambda: False)
    monkeypatch.setattr(pressure, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(pressure, "_CGROUPS", tmp_path / "cgroup")

    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    write("proc/meminfo", f"MemTotal: {100 << 20} kB\nMemAvailable: {50 << 20} kB\nHugePages: 0\n")
    return write


def group(write, limit: str, used: int, cached: int) -> None:
    """A container's memory, in bytes."""
    write("proc/self/cgroup", "0::/box\n")
    write("cgroup/box/memory.max", limit)
    write("cgroup/box/memory.current", str(used))
    write("cgroup/box/memory.stat", f"anon 1\ninactive_file {cached}\nactive_file 0\n")


@pytest.mark.parametrize(("available", "level"), [(2 << 20, NONE), (800 << 10, LOW), (9, CRITICAL)])
def test_the_machine_has_little_left(system, available, level):
    system("proc/meminfo", f"MemTotal: {100 << 20} kB\nMemAvailable: {available} kB\n")
    assert memory_pressure().level == level


@pytest.mark.parametrize(
    ("used", "cached", "level"),
    [
        (5 * GB, 0, NONE),
        (10 * GB - (300 << 20), 0, LOW),
        (10 * GB - (300 << 20), 5 * GB, NONE),  # caches of files are dropped
        (10 * GB - 1, 0, CRITICAL),
    ],
)
def test_a_container_has_little_left(system, used, cached, level):
    group(system, f"{10 * GB}\n", used, cached)
    result = memory_pressure()
    assert result.level == level and ("container" in result.reason) == bool(level)


def test_the_least_room_is_what_is_free(system, monkeypatch):
    assert pressure.free_memory() == 50 * GB
    group(system, f"{10 * GB}\n", 6 * GB, 2 * GB)
    assert pressure.free_memory() == 6 * GB
    monkeypatch.setattr(macos, "is_macos", lambda: True)
    monkeypatch.setattr(pressure, "host_memory", lambda: 100 * GB)
    for percent, free in ((40, 40 * GB), (0, None)):
        monkeypatch.setattr(macos, "sysctl", {"kern.memorystatus_level": percent}.__getitem__)
        assert pressure.free_memory() == free


def test_a_container_without_a_limit_is_the_machine(system):
    group(system, "max\n", 10 * GB, 0)
    assert memory_pressure().level == NONE


def test_a_limit_of_an_outer_group_counts(system):
    group(system, "max", GB, 0)
    system("proc/self/cgroup", "0::/outer/box\n")
    for name, text in (("max", str(2 * GB)), ("current", str(2 * GB - 1)), ("stat", "")):
        system(f"cgroup/outer/memory.{name}", text)
    assert memory_pressure().level == CRITICAL


@pytest.mark.parametrize(("number", "level"), [(0, NONE), (1, NONE), (2, LOW), (4, CRITICAL)])
def test_macos_says_it_by_a_number(monkeypatch, number, level):
    """What a Mac answers was never seen here."""
    monkeypatch.setattr(macos, "is_macos", lambda: True)
    monkeypatch.setattr(macos, "sysctl", lambda name: number)
    assert memory_pressure().level == level
