"""What the package loads by name: observers, and the parts that only a CPU needs."""

import functools
import pkgutil
from typing import Any

CPU_PARTS = {"blas": "cpu.blas:bind", "profile": "cpu.profile:CPU"}


@functools.cache
def load(name: str) -> Any:
    """Return what ``cpu.blas:bind`` names, ``mlx_packs.cpu.blas.bind``."""
    return pkgutil.resolve_name(f"{__package__}.{name}")
