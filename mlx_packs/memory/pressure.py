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


@dataclass(frozen=True)
class _Room:
    available: int
    limit: int
    name: str

    def pressure(self) -> Pressure:
        low = min(_LOW * self.limit, _LOW_BYTES)
        reason = (
            f"{size(max(self.available, 0))} of {size(self.limit)} of {self.name} are available"
        )
        if self.available < low:
            level = CRITICAL if self.available < low / 2 else LOW
            return Pressure(level, reason)
        return Pressure(NONE)


def memory_pressure() -> Pressure:
    """Return the memory pressure by macOS's own level, or by the limits of a Linux process."""
    if macos.is_macos():
        return _of_macos()

    rooms = [*map(_of_group, _groups()), _of_machine()]
    pressures = [room.pressure() for room in rooms if room is not None]
    return max(pressures, key=lambda pressure: pressure.level, default=Pressure(NONE))


def _of_macos() -> Pressure:
    level = _MACOS_LEVELS.get(macos.sysctl("kern.memorystatus_vm_pressure_level"), NONE)
    if level == NONE:
        return Pressure(NONE)

    name = "critical" if level == CRITICAL else "warning"
    return Pressure(level, f"macOS reports memory pressure ({name})")


def _groups() -> Iterator[Path]:
    """Yield the folders of the memory cgroups (2 and 1) of this process, innermost first."""
    with suppress(OSError):
        for line in (_PROC / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            root = _CGROUPS / controllers
            folder = root / path.lstrip("/")
            while folder != root and root in folder.parents:
                yield folder
                folder = folder.parent
            yield root


def _of_group(group: Path) -> _Room | None:
    """Return the room in a cgroup, where it has a limit; caches of files can be dropped."""
    for limit, used, dropped in (
        ("memory.max", "memory.current", ("inactive_file", "active_file")),
        (
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            ("total_inactive_file", "total_active_file"),
        ),
    ):
        with suppress(OSError, ValueError):  # no such file, or "max"
            most = int((group / limit).read_text())
            taken = int((group / used).read_text())
            lines = (line.split() for line in (group / "memory.stat").read_text().splitlines())
            taken -= sum(int(value) for name, value in lines if name in dropped)

            if most < 1 << 60:  # version 1 has a number for no limit
                return _Room(most - taken, most, "the container's memory")
    return None


def _of_machine() -> _Room | None:
    with suppress(OSError, ValueError, KeyError):
        lines = (_PROC / "meminfo").read_text().splitlines()
        kib = {name: int(rest.split()[0]) for name, _, rest in (x.partition(":") for x in lines)}
        return _Room(kib["MemAvailable"] << 10, kib["MemTotal"] << 10, "the memory")
    return None
