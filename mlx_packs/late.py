"""Parts of the package that a module loads by name, so that it does not depend on theirs."""

import functools
import pkgutil
from typing import Any


@functools.cache
def load(name: str) -> Any:
    """Return what ``cpu.blas:bind`` names, ``mlx_packs.cpu.blas.bind``."""
    return pkgutil.resolve_name(f"{__package__}.{name}")
