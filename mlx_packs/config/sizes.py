"""Sizes as people write them: ``8``, ``8GB``, ``8 gb``, ``500M``, ``24GiB``."""

import math
import re

_UNITS = {
    **{"": 1, "B": 1, "K": 10**3, "KB": 10**3, "M": 10**6, "MB": 10**6, "G": 10**9, "GB": 10**9},
    **{"T": 10**12, "TB": 10**12, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30},
}


def bytes_of(text: str, unit: str = "") -> int | None:
    """Return the bytes of a size, or None if it is none; ``unit`` is that of a number alone."""
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([a-z]*)", text.strip(), re.IGNORECASE)
    if match is None:
        return None
    factor = _UNITS.get((match[2] or unit).upper())
    if factor is None:
        return None
    number = float(match[1]) * factor
    return int(number) if math.isfinite(number) else None
