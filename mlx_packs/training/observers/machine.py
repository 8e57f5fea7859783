"""Thermal pressure, Low Power Mode and memory pressure of a Mac during training."""

import time

from ... import macos
from ...memory.pressure import memory_pressure
from ..observer import Observer
from . import ObservedRun

_EVERY = 10.0  # seconds between two readings; each starts two programs

# Fields in the lines of metrics.jsonl, and what the report calls the share of the time with a
# number above 0.
_THERMAL = "thermal_pressure"
_SAVING = "low_power_mode"
_MEMORY = "memory_pressure_level"
SHARES = {_THERMAL: "throttled", _SAVING: "low_power_mode", _MEMORY: "memory_pressure"}


class Machine(Observer):
    """Adds the state of a Mac to the lines of reports, and says at the end what it cost.

    The fields are numbers: ``thermal_pressure`` 0 (nominal) to 4 (`macos.THERMAL`),
    ``low_power_mode`` 0 or 1, ``memory_pressure_level`` 0 (none) to 2 (critical). What macOS does
    not say is left out.
    """

    def __init__(self, observed: ObservedRun) -> None:
        self._display = observed.run.display
        self._curve = observed.curve
        self._unit = observed.unit
        self._state: dict[str, int] = {}
        self._next = 0.0

    @classmethod
    def of(cls, observed: ObservedRun) -> "Machine | None":
        """Return the observer on a Mac; None elsewhere."""
        if not macos.is_macos():
            return None
        return cls(observed)

    def on_report(self, line: dict, batches_per_s: float) -> None:
        """Add the state of the machine to the line, which is logged after this."""
        if (now := time.monotonic()) >= self._next:
            self._state = read_state()
            self._next = now + _EVERY
        line |= self._state

    def on_end(self, report: dict) -> None:
        shares = shares_of(self._curve, self._unit)
        if not shares:
            return

        report["machine"] = {f"{SHARES[name]}_share": share for name, share in shares.items()}
        if _THERMAL in shares:
            hottest = max(line.get(_THERMAL, 0) for line in self._curve)
            report["machine"]["thermal_pressure"] = macos.THERMAL[hottest]
        self._display.line("machine", described(report["machine"]))


def read_state() -> dict[str, int]:
    """Return the fields of a line, as far as macOS tells them."""
    state: dict[str, int] = {}
    if (thermal := macos.thermal_pressure()) is not None:
        state[_THERMAL] = macos.THERMAL.index(thermal)
    if (saving := macos.low_power_mode()) is not None:
        state[_SAVING] = int(saving)
    if (level := memory_pressure().level) is not None:
        state[_MEMORY] = level
    return state


def shares_of(curve: list[dict], unit: str) -> dict[str, float]:
    """Return the share of the training time that each field was above 0, of the time it is known.

    A line covers the seconds since the one before, by what was trained on and how fast; so a
    resumed run counts whole.
    """
    known = dict.fromkeys(SHARES, 0.0)
    above = dict.fromkeys(SHARES, 0.0)
    trained = 0

    for line in curve:
        if f"trained_{unit}" not in line:
            continue

        speed = line.get(f"{unit}_per_s") or float("inf")
        seconds = (line[f"trained_{unit}"] - trained) / speed
        trained = line[f"trained_{unit}"]
        for name in SHARES:
            if isinstance(line.get(name), int):
                known[name] += seconds
                if line[name] > 0:
                    above[name] += seconds

    return {name: above[name] / known[name] for name in SHARES if known[name] > 0}


def described(machine: dict) -> str:
    """Return the entry ``machine`` of a report as one line."""
    parts = []
    if "throttled_share" in machine:
        text = f"throttled {machine['throttled_share']:.0%} of the training time"
        hottest = machine["thermal_pressure"]
        if hottest != "nominal":
            text += f" (thermal pressure {hottest} at most)"
        parts.append(text)

    if "low_power_mode_share" in machine:
        parts.append(f"in Low Power Mode {machine['low_power_mode_share']:.0%}")
    if "memory_pressure_share" in machine:
        parts.append(f"under memory pressure {machine['memory_pressure_share']:.0%}")
    return " · ".join(parts)
