"""Memory pressure of this machine, or of the container of this process."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .. import macos
from ..display import size
from ..runtime import host_memory

NONE, LOW, CRITICAL = range(3)  # levels: nothing, take less, end before the system swaps or kills
_CGROUPS = Path("/sys/fs/cgroup")
_PROC = Path("/proc")
_LOW = 0.05  # of what there is; half of it is critical
_LOW_BYTES = 1 << 30  # at most so many
_MACOS_LEVELS = {1: NONE, 2: LOW, 4: CRITICAL}  # DISPATCH_MEMORYPRESSURE_NORMAL, _WARN, _CRITICAL


@dataclass(frozen=True)
class Pressure:
    """The level of memory pressure (`NONE`, `LOW`, `CRITICAL`), and its source."""

    level: int
    reason: str = ""


def memory_pressure() -> Pressure:
    """Return the memory pressure by macOS's own level, or by the limits of a Linux process."""
    if macos.is_macos():
        return _of_macos()

    pressures = [_of_room(*room) for room in _rooms()]
    return max(pressures, key=lambda pressure: pressure.level, default=Pressure(NONE))


def free_memory() -> int | None:
    """Return the bytes of host memory that programs can have now; None if that is not known."""
    if not macos.is_macos():
        return min((available for available, *_ in _rooms()), default=None)
    percent = macos.sysctl("kern.memorystatus_level")  # as memory_pressure(1) prints it
    return host_memory() * percent // 100 or None


def _of_room(available: int, limit: int, name: str) -> Pressure:
    low = min(_LOW * limit, _LOW_BYTES)
    if available >= low:
        return Pressure(NONE)
    level = CRITICAL if available < low / 2 else LOW
    return Pressure(level, f"{size(max(available, 0))} of {size(limit)} of {name} are available")


def _of_macos() -> Pressure:
    level = _MACOS_LEVELS.get(macos.sysctl("kern.memorystatus_vm_pressure_level"), NONE)
    if level == NONE:
        return Pressure(NONE)

    name = "critical" if level == CRITICAL else "warning"
    return Pressure(level, f"macOS reports memory pressure ({name})")


def _groups() -> Iterator[Path]:
    """Yield the folders of the memory cgroups of this process, innermost first."""
    with suppress(OSError, ValueError):
        (line, *_) = (_PROC / "self" / "cgroup").read_text().splitlines()
        folder = _CGROUPS / line.rpartition(":")[2].lstrip("/")
        while folder != _CGROUPS and _CGROUPS in folder.parents:
            yield folder
            folder = folder.parent
        yield _CGROUPS


def _rooms() -> Iterator[tuple[int, int, str]]:
    """Yield the available bytes, all bytes and the name of each memory that limits this process."""
    for group in _groups():
        with suppress(OSError, ValueError):  # no such file, or "max"
            yield _of_group(group)
    with suppress(OSError, ValueError, KeyError):
        lines = (_PROC / "meminfo").read_text().splitlines()
        kib = {name: int(rest.split()[0]) for name, _, rest in (x.partition(":") for x in lines)}
        yield kib["MemAvailable"] << 10, kib["MemTotal"] << 10, "the memory"


def _of_group(group: Path) -> tuple[int, int, str]:
    """Return the room in a cgroup, whose caches of files can be dropped."""
    most = int((group / "memory.max").read_text())
    taken = int((group / "memory.current").read_text())
    lines = (line.split() for line in (group / "memory.stat").read_text().splitlines())
    taken -= sum(int(n) for name, n in lines if name in ("inactive_file", "active_file"))
    return most - taken, most, "the container's memory"
