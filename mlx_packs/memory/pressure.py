"""Memory pressure of this machine, or of the container of this process."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .. import macos
from ..display import size

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

    pressures = [*map(_of_group, _groups()), _of_machine()]
    return max(pressures, key=lambda pressure: pressure.level)


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


def _of_group(group: Path) -> Pressure:
    """Return the pressure in a cgroup, if it has a limit; caches of files can be dropped."""
    with suppress(OSError, ValueError):  # no such file, or "max"
        most = int((group / "memory.max").read_text())
        taken = int((group / "memory.current").read_text())
        lines = (line.split() for line in (group / "memory.stat").read_text().splitlines())
        taken -= sum(int(n) for name, n in lines if name in ("inactive_file", "active_file"))
        return _of_room(most - taken, most, "the container's memory")
    return Pressure(NONE)


def _of_machine() -> Pressure:
    with suppress(OSError, ValueError, KeyError):
        lines = (_PROC / "meminfo").read_text().splitlines()
        kib = {name: int(rest.split()[0]) for name, _, rest in (x.partition(":") for x in lines)}
        return _of_room(kib["MemAvailable"] << 10, kib["MemTotal"] << 10, "the memory")
    return Pressure(NONE)
