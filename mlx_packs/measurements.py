"""Measurements of this device, stored for later runs in the user's cache.

A measurement is found by its kind, by what was measured, and by every fact of the machine that a
time depends on.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from . import __version__, runtime
from .cache import Cache, key_of
from .runtime import mx

_CACHE = Cache("measurements", days=90)
_discarding = False


def device() -> dict:
    """Return the facts of this machine and its software on which a measured time depends."""
    blas = runtime.BLAS
    return {
        "name": runtime.device_name(),
        "cores": os.cpu_count(),
        "memory": runtime.total_memory(),
        "mlx": mx.__version__,
        "mlx_packs": __version__,
        "blas": [blas.name, blas.threads],
    }


def recall(kind: str, of: Mapping) -> dict | None:
    """Return an earlier measurement of this device; None if there is none.

    ``of`` (JSON) is all that the result depends on besides the device: shapes, dtypes.
    """
    return _CACHE.get_json(key_of(kind, device(), of))


def remember(kind: str, of: Mapping, result: Mapping) -> None:
    """Store a result (JSON) for `recall`, if the cache can be written."""
    if not _discarding and _CACHE.put_json(key_of(kind, device(), of), result):
        _CACHE.remove_unused()


@contextmanager
def discarded() -> Iterator[None]:
    """Store no measurements in a context, for a machine that something else slows down."""
    global _discarding
    before = _discarding
    _discarding = True
    try:
        yield
    finally:
        _discarding = before
