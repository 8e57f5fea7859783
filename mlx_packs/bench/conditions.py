"""Conditions besides the chip that affect the speed of a machine: power, heat, other programs.

Nothing here needs root. On a Mac it is read from `pmset`, `notifyutil` and `ioreg`; on Linux only
the load is known.
"""

import os
import re
from dataclasses import dataclass

from .. import macos
from ..runtime import on_cpu

BUSY_GPU = 20  # percent; the window server alone takes a few
BUSY_CPU = 0.5  # of the cores


@dataclass(frozen=True)
class Conditions:
    """The state of a machine at one moment; None is what cannot be known there.

    Attributes:
        power: ``AC`` or ``battery``.
        low_power_mode: Whether macOS saves energy.
        thermal: The thermal pressure, one of `macos.THERMAL`.
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


def read_conditions() -> Conditions:
    """Return the state of this machine."""
    load = round(os.getloadavg()[0] / (os.cpu_count() or 1), 2)
    if not macos.is_macos():
        return Conditions(load=load)

    therm = macos.output(["pmset", "-g", "therm"]) or ""
    gpu = macos.output(["ioreg", "-r", "-d", "1", "-w", "0", "-c", "IOAccelerator"]) or ""
    battery = macos.output(["pmset", "-g", "batt"]) or ""
    power = re.search(r"Now drawing from '(AC|Battery) Power'", battery)

    return Conditions(
        power=power and {"AC": "AC", "Battery": "battery"}[power[1]],
        low_power_mode=macos.low_power_mode(),
        thermal=macos.thermal_pressure(),
        cpu_speed_limit=macos.number(r"CPU_Speed_Limit\s*=\s*(\d+)", therm),
        gpu_utilization=macos.number(r'"Device Utilization %"\s*=\s*(\d+)', gpu),
        gpu_cores=macos.number(r'"gpu-core-count"\s*=\s*(\d+)', gpu),
        load=load,
    )


def disturbances(conditions: Conditions) -> list[str]:
    """Return what makes this machine slower than it can be, as ends of ``the machine …``."""
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
    names = {
        "power": "power",
        "low_power_mode": "low power mode",
        "thermal": "heat",
        "gpu_utilization": "use of the GPU",
    }
    return [words for name, words in names.items() if getattr(conditions, name) is None]
