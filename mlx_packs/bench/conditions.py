"""What besides the chip decides how fast a machine computes now: power, heat, other programs.

Nothing here needs root. On a Mac it is read from `pmset`, `notifyutil` and `ioreg`; on Linux only the
load is known.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..runtime import on_cpu

# Darwin's notification com.apple.system.thermalpressurelevel
THERMAL = ("nominal", "moderate", "heavy", "trapping", "sleeping")
BUSY_GPU = 20  # percent; the window server alone takes a few
BUSY_CPU = 0.5  # of the cores
_SECONDS = 10.0

Read = Callable[[Sequence[str]], str | None]


@dataclass(frozen=True)
class Conditions:
    """The state of a machine at one moment; None is what cannot be known there.

    Attributes:
        power: ``AC`` or ``battery``.
        low_power_mode: Whether macOS saves energy.
        thermal: The thermal pressure, one of `THERMAL`.
        cpu_speed_limit: Percent of the full speed; only Macs that limit it say so.
        gpu_utilization: Percent of the GPU that is in use.
        gpu_cores: Of the GPU.
        load: Programs that compute, per core: the average of the last minute.
    """

    power: str | None = None
    low_power_mode: bool | None = None
    thermal: str | None = None
    cpu_speed_limit: int | None = None
    gpu_utilization: int | None = None
    gpu_cores: int | None = None
    load: float | None = None


def read_conditions(read: Read | None = None, system: str = sys.platform) -> Conditions:
    """Return the state of this machine.

    Args:
        read: returns what a command prints, None if it cannot be run.
        system: as `sys.platform`.
    """
    load = round(os.getloadavg()[0] / (os.cpu_count() or 1), 2)
    if system != "darwin":
        return Conditions(load=load)
    read = read or _output
    therm = read(["pmset", "-g", "therm"]) or ""
    gpu = read(["ioreg", "-r", "-d", "1", "-w", "0", "-c", "IOAccelerator"]) or ""
    power = re.search(r"Now drawing from '(AC|Battery) Power'", read(["pmset", "-g", "batt"]) or "")
    saving = re.search(r"^\s*(?:lowpowermode|powermode)\s+(\d)", read(["pmset", "-g"]) or "", re.M)
    pressure = read(["notifyutil", "-g", "com.apple.system.thermalpressurelevel"])
    return Conditions(
        power=power and {"AC": "AC", "Battery": "battery"}[power[1]],
        low_power_mode=saving and saving[1] == "1",
        thermal=_thermal(pressure or "", therm),
        cpu_speed_limit=_number(r"CPU_Speed_Limit\s*=\s*(\d+)", therm),
        gpu_utilization=_number(r'"Device Utilization %"\s*=\s*(\d+)', gpu),
        gpu_cores=_number(r'"gpu-core-count"\s*=\s*(\d+)', gpu),
        load=load,
    )


def disturbances(conditions: Conditions) -> list[str]:
    """Return what makes figures of this machine lower than it can do, as ends of ``the machine …``."""
    causes = []
    if conditions.power == "battery":
        causes.append("runs on battery")
    if conditions.low_power_mode:
        causes.append("is in Low Power Mode")
    if conditions.thermal not in (None, "nominal"):
        causes.append(f"is hot (thermal pressure {conditions.thermal})")
    if (limit := conditions.cpu_speed_limit) is not None and limit < 100:
        causes.append(f"limits its speed to {limit} %")
    if (used := conditions.gpu_utilization) is not None and used >= BUSY_GPU:
        causes.append(f"has another program on its GPU ({used} % in use)")
    if on_cpu() and (conditions.load or 0) >= BUSY_CPU:
        causes.append(f"is busy with other programs ({conditions.load:.1f} per core)")
    return causes


def unknown(conditions: Conditions) -> list[str]:
    """Return what of the state of this machine cannot be read."""
    names = {
        "power": "power",
        "low_power_mode": "low power mode",
        "thermal": "heat",
        "gpu_utilization": "use of the GPU",
    }
    return [words for name, words in names.items() if getattr(conditions, name) is None]


def _thermal(pressure: str, therm: str) -> str | None:
    """Return the thermal pressure by the notification, else by what `pmset -g therm` has recorded."""
    level = _number(r"thermalpressurelevel\s+(\d+)", pressure)
    if level is not None and level < len(THERMAL):
        return THERMAL[level]
    level = _number(r"(?i)thermal warning level\s*[:=]\s*(\d+)", therm)
    if level is None:  # that no warning was recorded says nothing on Apple silicon
        return None
    return "heavy" if level else "nominal"


def _number(pattern: str, text: str) -> int | None:
    match = re.search(pattern, text)
    return int(match[1]) if match else None


def _output(command: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout + done.stderr
