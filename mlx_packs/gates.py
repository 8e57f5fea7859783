"""Gates: limits that a pack must meet. If one fails, the exit code is 1."""

import math
from collections.abc import Mapping

from .errors import PackError, flag_of

# What each limit bounds: the size of the folder; PPL and decoded tokens/s over the base's.
MEANING = {"max_pack_mb": "MB", "max_ppl_ratio": "PPL ratio", "min_tps_ratio": "speed ratio"}
Gates = dict[str, dict]


def gate_limits(**limits: float | None) -> dict[str, float]:
    """Return the limits that are set; a PackError if one is not a positive number."""
    for name, limit in limits.items():
        if limit is not None and not (math.isfinite(limit) and limit > 0):
            raise PackError(f"{flag_of(name)} {limit:g}: must be a positive number.")

    return {name: limit for name, limit in limits.items() if limit is not None}


def evaluate_gates(limits: Mapping[str, float], values: Mapping[str, float]) -> Gates:
    """Return each limit with the measured value and whether it passed; NaN never does."""
    gates = {}
    for name, limit in limits.items():
        value = values[name]
        passed = value <= limit if name.startswith("max") else value >= limit
        gates[name] = {"limit": limit, "value": value, "passed": passed}
    return gates


def failures(gates: Gates, where: str = "") -> list[str]:
    """Return a line for each gate that failed; ``where`` names the pack."""
    place = f" ({where})" if where else ""
    lines = []
    for name, gate in gates.items():
        if gate["passed"]:
            continue
        sign = ">" if name.startswith("max") else "<"
        lines.append(
            f"gate {flag_of(name)} failed{place}: {gate['value']:.6g} {sign} {gate['limit']:g}"
        )
    return lines


def gates_text(gates: Gates) -> str:
    """Return all gates for the end of a line: `` · MB 2.11 of 10 ok``."""
    text = ""
    for name, gate in gates.items():
        verdict = "ok" if gate["passed"] else "FAILED"
        label = MEANING.get(name, name)
        text += f" · {label} {gate['value']:.2f} of {gate['limit']:g} {verdict}"
    return text
